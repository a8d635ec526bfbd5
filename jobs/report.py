"""`python -m jobs.report RUN_DIR`: where a run's time went, from its metrics.jsonl and trace.json.

It reads files only, so it works on a running, a killed and a copied run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jobs.cli import run
from rl_actors.tracking.read_run import read_run
from rl_actors.tracking.records import RunMetrics
from rl_actors.tracking.stage_times import idle_seconds, overlap_table, pool_shares, stage_times, wall_seconds
from rl_actors.tracking.trace import Span


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report.

    Raises:
        ConfigError: RUN_DIR is not the folder of a run.
    """
    parser = argparse.ArgumentParser(prog="python -m jobs.report", description="Where a run's time went.")
    parser.add_argument("run_dir", type=Path, help="folder of a run: metrics.jsonl and trace.json lie in it")
    metrics, spans = read_run(parser.parse_args(argv).run_dir)
    print_report(metrics, spans, Console(width=None if sys.stdout.isatty() else 120, highlight=False))
    return 0


def print_report(metrics: RunMetrics, spans: Sequence[Span], console: Console) -> None:
    wall_s = wall_seconds(spans)
    if not wall_s:
        console.print("The trace holds no stage yet.")
        return
    console.print(
        f"{len(metrics.steps)} steps, {wall_s:.1f} s in stages, {idle_seconds(spans):.1f} s in none (also while a run "
        "that was resumed did not run). Stages of two pools overlap, so shares add up to more than 100 %.\n"
    )
    console.print(_stage_table(spans))
    console.print(_overlaps(spans))
    console.print(_where_time_goes(metrics, spans, wall_s))


def _stage_table(spans: Sequence[Span]) -> Table:
    columns = ("stage", "pool", "steps", "total", "share", "mean", "p50", "p95", "max")
    table = _table("Stage times (seconds per step)", *columns)
    for row in stage_times(spans):
        seconds = (f"{value:.3f}" for value in (row.mean_s, row.median_s, row.p95_s, row.max_s))
        table.add_row(row.stage, row.pool, str(row.steps), f"{row.total_s:.1f}", f"{row.share:.0%}", *seconds)
    return table


def _overlaps(spans: Sequence[Span]) -> Table:
    table = _table("Both at once", "stages", "seconds", "of the shorter")
    for row in overlap_table(spans):
        table.add_row(f"{row.first} + {row.second}", f"{row.seconds:.2f}", f"{row.share:.0%}")
    return table


def _where_time_goes(metrics: RunMetrics, spans: Sequence[Span], wall_s: float) -> Table:
    table = _table("Where the time goes", "what", "value")
    for pool, share in pool_shares(spans).items():
        table.add_row(f"{pool} pool at work", f"{share:.0%}")
    waited_s = sum(record.seconds.get("rollout_wait", 0.0) for record in metrics.steps)
    table.add_row("trainer waits for rollout", f"{waited_s:.1f} s ({waited_s / wall_s:.0%})")
    syncs = [record for record in metrics.steps if record.sync_s > 0]
    if syncs:
        rate = sum(record.sync_bytes for record in syncs) / sum(record.sync_s for record in syncs)
        table.add_row("sync", f"{sum(r.sync_s for r in syncs) / len(syncs):.3f} s each, {rate / 1e6:.1f} MB/s")
    step_s = sum(record.step_s for record in metrics.steps)
    if step_s > 0:
        table.add_row("trained", f"{sum(record.tokens_trained for record in metrics.steps) / step_s:.0f} tokens/s")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", pad_edge=False, box=None)
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="left" if column == "pool" else "right")
    return table


if __name__ == "__main__":
    run(main)
