"""What is left of a run for people and machines: RUN_DIR/summary.json and RUN_DIR/reward_curve.png.

Invariant: summary.json is whole or absent; it is written beside its place and renamed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rl_actors.tracking.records import RunMetrics, plain

SUMMARY_FILE = "summary.json"
CURVE_FILE = "reward_curve.png"


def build_summary(metrics: RunMetrics, wall_s: float, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The run in one flat dictionary; `extra` wins over what is computed here.

    `reward_first` and `reward_last` are means over the first and the last `reward_window` steps (a fifth of the run,
    at most 10 steps). `eval_before` is the evaluation before the first step, `eval_after` the newest one after it;
    what was not measured is None.
    """
    steps, evals = metrics.steps, metrics.evals
    window = max(1, min(10, len(steps) // 5))
    rewards = [record.reward_mean for record in steps]
    summary: dict[str, Any] = {
        "eval_before": next((record.value for record in evals if record.step == 0), None),
        "eval_after": next((record.value for record in reversed(evals) if record.step > 0), None),
        "reward_first": _mean(rewards[:window]),
        "reward_last": _mean(rewards[-window:]),
        "reward_window": window,
        "steps": steps[-1].step if steps else 0,
        "wall_s": wall_s,
        "versions_published": max((record.version for record in steps), default=0),
        "max_staleness_seen": max((record.staleness_max for record in steps), default=0),
        "staleness_mean": _mean([record.staleness_mean for record in steps]),
        "dropped_stale": sum(record.dropped_stale for record in steps),
        "tokens_trained": sum(record.tokens_trained for record in steps),
        "tokens_per_s": _tokens_per_s(metrics),
        "step_s_mean": _mean([record.step_s for record in steps]),
        "sync_s_mean": _mean([record.sync_s for record in steps]),
        "seconds": _stage_totals(metrics),
    }
    return plain(summary | dict(extra))


def write_json(path: Path, tree: Mapping[str, Any]) -> None:
    """Write `tree` to `path`, whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(plain(tree), file, indent=2, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def plot_reward_curve(metrics: RunMetrics, path: Path, title: str, max_staleness: int | None = None) -> None:
    """Draw reward per step with its moving mean and the evaluations, staleness below. Needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 5.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    _draw_reward(top, metrics)
    top.set_title(title, loc="left")
    _draw_staleness(bottom, metrics, max_staleness)
    bottom.set_xlabel("training step")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, format="png")
    temporary.replace(path)


def moving_mean(values: list[float], window: int) -> np.ndarray:
    """float64 [len(values)]: the mean of each value and up to `window - 1` before it; NaN values are left out."""
    array = np.asarray(values, dtype=np.float64)
    known = ~np.isnan(array)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, array, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    ends = np.arange(1, len(array) + 1)
    starts = np.maximum(0, ends - window)
    with np.errstate(invalid="ignore"):
        return (sums[ends] - sums[starts]) / (counts[ends] - counts[starts])


def _draw_reward(axes: Any, metrics: RunMetrics) -> None:
    steps = [record.step for record in metrics.steps]
    rewards = [record.reward_mean for record in metrics.steps]
    window = max(2, min(25, len(steps) // 6))
    axes.plot(steps, rewards, color="#9db8d9", linewidth=1, marker="o", markersize=2.5, label="training reward")
    axes.plot(steps, moving_mean(rewards, window), color="#1f4e8c", linewidth=2, label=f"mean of {window} steps")
    if metrics.evals:
        evals = metrics.evals
        axes.plot(
            [record.step for record in evals],
            [record.value for record in evals],
            color="#d1495b",
            linestyle="--",
            linewidth=1,
            marker="D",
            markersize=7,
            label="held-out reward",
        )
        for record in {evals[0].step: evals[0], evals[-1].step: evals[-1]}.values():
            axes.annotate(
                f"{record.value:.2f}", (record.step, record.value), (0, 8), textcoords="offset points", ha="center"
            )
    axes.margins(y=0.12)
    axes.set_ylabel("reward")
    axes.legend(frameon=False, loc="lower right")


def _draw_staleness(axes: Any, metrics: RunMetrics, max_staleness: int | None) -> None:
    steps = [record.step for record in metrics.steps]
    means = [record.staleness_mean for record in metrics.steps]
    greatest = [record.staleness_max for record in metrics.steps]
    axes.plot(steps, means, color="#3c8d5a", linewidth=1.5, label="mean")
    axes.plot(steps, greatest, color="#a8c8b0", linewidth=1, drawstyle="steps-mid", label="max", zorder=1)
    if max_staleness is not None:
        axes.axhline(max_staleness, color="#888888", linestyle=":", linewidth=1.2, label=f"bound {max_staleness}")
    axes.set_ylim(bottom=-0.1)
    axes.set_ylabel("staleness\n(versions)")
    axes.legend(frameon=False, loc="upper right", ncols=3, fontsize="small", bbox_to_anchor=(1.0, 1.22))


def _mean(values: list[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else None


def _tokens_per_s(metrics: RunMetrics) -> float | None:
    seconds = sum(record.step_s for record in metrics.steps)
    return sum(record.tokens_trained for record in metrics.steps) / seconds if seconds else None


def _stage_totals(metrics: RunMetrics) -> dict[str, float]:
    totals: dict[str, float] = {}
    for record in metrics.steps:
        for stage, seconds in record.seconds.items():
            totals[stage] = totals.get(stage, 0.0) + seconds
    return totals
