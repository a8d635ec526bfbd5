"""summary.json says what the records say; the curve is drawn for short and empty runs too."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from rl_actors.tracking.records import EvalRecord, RunMetrics, StepRecord
from rl_actors.tracking.summary import build_summary, moving_mean, plot_reward_curve, write_json


def run(steps: int) -> RunMetrics:
    records = [
        StepRecord(
            step=n,
            version=n,
            reward_mean=n / 10,
            staleness_max=n % 3,
            dropped_stale=1,
            seconds={"update": 2.0},
            step_s=4.0,
            tokens_trained=100,
        )
        for n in range(1, steps + 1)
    ]
    return RunMetrics(records, [EvalRecord(step=0, value=0.3), EvalRecord(step=steps, value=0.7)])


def test_summary_of_a_run() -> None:
    summary = build_summary(run(10), 45.0, {"seed": 3})
    # A fifth of the run: two steps.
    assert [summary["reward_first"], summary["reward_last"]] == pytest.approx([0.15, 0.95])
    assert (summary["eval_before"], summary["eval_after"]) == (0.3, 0.7)
    assert (summary["steps"], summary["wall_s"], summary["versions_published"]) == (10, 45.0, 10)
    assert (summary["max_staleness_seen"], summary["dropped_stale"], summary["seed"]) == (2, 10, 3)
    assert summary["tokens_per_s"] == 25.0 and summary["seconds"] == {"update": 20.0}


def test_what_was_not_measured_is_null() -> None:
    summary = build_summary(RunMetrics([], [EvalRecord(step=0, value=0.3)]), 1.0, {})
    assert summary["eval_before"] == 0.3
    assert summary["eval_after"] is summary["reward_first"] is summary["sync_s_mean"] is None


def test_summary_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")
    write_json(path, {"loss": math.nan, "steps": np.int64(3)})
    assert json.loads(path.read_text()) == {"loss": None, "steps": 3}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_moving_mean_is_of_the_past_and_leaves_out_nan() -> None:
    assert moving_mean([1.0, 3.0, math.nan, 5.0], 2).tolist() == [1.0, 2.0, 3.0, 5.0]


def test_curve_of_any_run(tmp_path: Path) -> None:
    for name, metrics in {"full": run(40), "one": run(1), "none": RunMetrics([], [])}.items():
        plot_reward_curve(metrics, tmp_path / f"{name}.png", "reward", max_staleness=2)
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
