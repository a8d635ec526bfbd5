"""What a person sees of a run: a start table, one line that moves, an end table.

On a terminal the line is a tqdm bar. Where the stream is a pipe, as in the logs of a Ray job, the same line is printed
anew at most every few seconds, without carriage returns. All other messages go through logging.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.table import Table
from tqdm import tqdm

from rl_actors.tracking.records import StepRecord
from rl_actors.tracking.stage_times import StageTime

BAR = "{desc}{n_fmt}/{total_fmt} {percentage:3.0f}%|{bar:20}| {elapsed}<{remaining}{postfix}"

MAX_ROWS = 64


@dataclass(frozen=True)
class PlacedActor:
    """One row of the start table: which actor sits where. `gpus` is empty on CPU."""

    pool: str
    actor: str
    bundle: str
    node: str
    gpus: str = ""
    pid: int | None = None


class Console:
    """Progress of one run.

    Args:
        total: training steps of the whole run. A resumed run is counted on from the first step that is shown.
        stream: where everything is shown; standard error unless given.
        interval_s: least time between two progress lines on a pipe.
    """

    def __init__(self, total: int, stream: TextIO | None = None, interval_s: float = 3.0) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._total = total
        self._first: int | None = None
        self._interval_s = interval_s
        self._started = self._shown = time.monotonic()
        self._rich = RichConsole(file=self._stream, width=None if self._stream.isatty() else 120, highlight=False)
        self._bar: Any = None

    def start(self, actors: Sequence[PlacedActor], dashboard: str | None) -> None:
        """Show where every actor sits, and where to watch them."""
        gpus = any(actor.gpus for actor in actors)
        table = Table(title="Where the pools run", title_justify="left", pad_edge=False, box=None)
        for column in ("pool", "actor", "bundle", "node", *(["GPU"] if gpus else []), "pid"):
            table.add_column(column)
        for actor in actors[:MAX_ROWS]:
            cells = [actor.pool, actor.actor, actor.bundle, actor.node, *([actor.gpus] if gpus else [])]
            table.add_row(*cells, "" if actor.pid is None else str(actor.pid))
        self._rich.print(table)
        if len(actors) > MAX_ROWS:
            self._rich.print(f"... and {len(actors) - MAX_ROWS} more")
        self._rich.print(f"Dashboard: {dashboard}" if dashboard else "Dashboard: not running")
        # The clock of the progress line runs from here: starting the pools is not progress.
        self._started = time.monotonic()

    def step(self, record: StepRecord) -> None:
        """Move on by one step."""
        starts = self._first is None
        if self._first is None:
            self._first = record.step - 1
        if self._stream.isatty():
            if self._bar is None:
                self._bar = tqdm(total=self._total, initial=self._first, file=self._stream, bar_format=BAR, ncols=120)
            self._bar.set_postfix_str(progress_text(record), refresh=False)
            self._bar.update(record.step - self._bar.n)
            return
        now = time.monotonic()
        if starts or record.step == self._total or now - self._shown >= self._interval_s:
            self._shown = now
            self._print(self._line(record, self._first, now - self._started))

    def evaluation(self, step: int, value: float) -> None:
        self._print(f"evaluation after step {step}: reward {value:.3f}")

    def finish(self, summary: Mapping[str, Any], stages: Sequence[StageTime]) -> None:
        """Close the bar and show the run in a table."""
        self.close()
        table = Table(title="The run", title_justify="left", show_header=False, pad_edge=False, box=None)
        for name, value in summary_rows(summary, stages):
            table.add_row(name, value)
        self._rich.print(table)
        self._stream.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _line(self, record: StepRecord, first: int, elapsed_s: float) -> str:
        return tqdm.format_meter(
            n=record.step,
            total=self._total,
            initial=first,
            elapsed=elapsed_s,
            bar_format=BAR,
            postfix=progress_text(record),
            ncols=None,
            ascii=False,
            prefix="step ",
        ).replace("step : ", "step ")

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()


def progress_text(record: StepRecord) -> str:
    """The step's main numbers on one line; what is not known is left out."""
    parts = [
        ("reward", f"{record.reward_mean:.3f}", record.reward_mean),
        ("staleness", f"{record.staleness_mean:.2f} (max {record.staleness_max})", record.staleness_mean),
        ("sync", f"{record.sync_s:.2f} s", record.sync_s),
        ("", f"{_short(record.tokens_per_s)} tokens/s", record.tokens_per_s),
    ]
    return "  ".join(f"{name} {text}".strip() for name, text, value in parts if not math.isnan(value))


def summary_rows(summary: Mapping[str, Any], stages: Sequence[StageTime]) -> list[tuple[str, str]]:
    """The end table: name and value."""
    rows = [
        ("held-out reward", f"{_number(summary['eval_before'])} before, {_number(summary['eval_after'])} after"),
        ("training reward", f"{_number(summary['reward_first'])} first, {_number(summary['reward_last'])} last"),
        ("steps", f"{summary['steps']} in {summary['wall_s']:.1f} s"),
        ("versions published", str(summary["versions_published"])),
        ("staleness", f"mean {_number(summary['staleness_mean'])}, max {summary['max_staleness_seen']}"),
        ("dropped as too old", str(summary["dropped_stale"])),
        ("sync", f"{_number(summary['sync_s_mean'])} s on average"),
    ]
    if summary["tokens_per_s"] is not None:
        rows.append(("trained", f"{_short(summary['tokens_per_s'])} tokens/s"))
    if stages:
        rows.append(("share of time", ", ".join(f"{row.stage} {row.share:.0%}" for row in stages[:6])))
    return rows


def configure_logging() -> None:
    """Show this project's messages from INFO on, unless the process has its own logging. Safe to call twice."""
    logger = logging.getLogger("rl_actors")
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _short(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 10_000 else f"{value:.0f}"
