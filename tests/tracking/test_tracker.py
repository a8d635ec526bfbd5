"""One call reaches every output, and a resumed run reads as one run."""

from __future__ import annotations

import asyncio
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from jobs.report import main as report
from rl_actors.config import RunConfig
from rl_actors.config_file import parse_config
from rl_actors.errors import ConfigError
from rl_actors.tracking.records import StepRecord, read_metrics
from rl_actors.tracking.trace import Span, overlaps, read_trace
from rl_actors.tracking.tracker import Tracker


def config(run_dir: Path, **tracking: Any) -> RunConfig:
    tree = {
        "run_dir": str(run_dir),
        "model": {"path": "model"},
        "data": {"train": "train.jsonl"},
        "pipeline": {"steps": 4},
        "tracking": {"wandb": "off", **tracking},
    }
    return parse_config(tree, "test")


def record(step: int, **values: Any) -> StepRecord:
    return StepRecord(
        step=step,
        version=step,
        reward_mean=step / 10,
        staleness_mean=0.5,
        staleness_max=1,
        tokens_trained=100,
        **values,
    )


async def pipeline(tracker: Tracker, first: int, last: int) -> None:
    """Rollouts of the next step run while this one is trained."""

    async def rollout(step: int) -> None:
        with tracker.span("rollout", step, "rollout"):
            await asyncio.sleep(0.03)

    ahead = asyncio.create_task(rollout(first))
    for step in range(first, last + 1):
        with tracker.span("rollout_wait", step, "driver"):
            await ahead
        ahead = asyncio.create_task(rollout(step + 1))
        with tracker.span("update", step, "trainer"):
            await asyncio.sleep(0.02)
        with tracker.span("sync", step, "sync"):
            await asyncio.sleep(0.01)
        tracker.step(record(step, sync_bytes=1000))
    await ahead


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The folder of a run of 4 steps."""
    run_dir = tmp_path / "run"
    tracker = Tracker(config(run_dir), run_dir)
    tracker.start()
    tracker.evaluation(0, 0.25)
    asyncio.run(pipeline(tracker, 1, 4))
    tracker.evaluation(4, 0.5)
    tracker.finish({"versions_published": 4})
    return run_dir


def test_run_folder_holds_everything(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert {key: summary[key] for key in ("eval_before", "eval_after", "steps", "max_staleness_seen")} == {
        "eval_before": 0.25,
        "eval_after": 0.5,
        "steps": 4,
        "max_staleness_seen": 1,
    }
    assert (finished / "reward_curve.png").stat().st_size > 10_000
    assert overlaps(read_trace(finished), "rollout", "update") > 0.02


def test_spans_fill_the_seconds_of_their_own_step(finished: Path) -> None:
    spans = read_trace(finished)
    for step in read_metrics(finished).steps:
        assert set(step.seconds) == {"rollout", "rollout_wait", "update", "sync"}
        own = {span.stage: span.seconds for span in spans if span.step == step.step}
        assert step.seconds == pytest.approx(own, abs=0.005)
        assert step.step_s >= 0.03 and step.tokens_per_s == pytest.approx(100 / step.step_s)


def test_checkpoint_behind_the_record_counts_for_the_next(tmp_path: Path) -> None:
    tracker = Tracker(config(tmp_path), tmp_path)
    now = time.time()
    tracker.step(record(1))
    tracker.add_span(Span("checkpoint", 1, "trainer", now, now + 3))
    tracker.add_span(Span("rollout", 3, "rollout", now, now + 5))
    assert tracker.step(record(2)).seconds == {"checkpoint": pytest.approx(3.0)}
    assert tracker.step(record(3)).seconds == {"rollout": pytest.approx(5.0)}
    tracker.finish()


def test_resumed_run_reads_as_one(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    tracker = Tracker(config(run_dir), run_dir)
    tracker.evaluation(0, 0.25)
    asyncio.run(pipeline(tracker, 1, 3))
    # Killed after step 3 with the checkpoint of step 2: nothing is closed.
    before = read_metrics(run_dir).steps[1]
    resumed = Tracker(config(run_dir), run_dir, resume_step=2)
    asyncio.run(pipeline(resumed, 3, 4))
    summary = resumed.finish()
    steps = read_metrics(run_dir).steps
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert steps[1] == before
    assert steps[2].elapsed_s > before.elapsed_s, "the clock goes on where the checkpoint was"
    assert summary["eval_before"] == 0.25 and summary["wall_s"] > before.elapsed_s
    assert [span.step for span in read_trace(run_dir) if span.stage == "update"] == [1, 2, 3, 3, 4]


def test_seconds_measured_by_the_driver_win(tmp_path: Path) -> None:
    tracker = Tracker(config(tmp_path), tmp_path)
    now = time.time()
    tracker.add_span(Span("update", 1, "trainer", now - 2, now))
    assert tracker.step(record(1)).seconds["update"] == pytest.approx(2.0)
    written = tracker.step(record(2, seconds={"update": 7.0}, step_s=9.0))
    assert (written.seconds, written.step_s) == ({"update": 7.0}, 9.0)
    tracker.finish()


def test_failed_run_leaves_records_but_no_summary(tmp_path: Path) -> None:
    tracker = Tracker(config(tmp_path), tmp_path)
    with pytest.raises(RuntimeError), tracker.span("update", 1, "trainer"):
        raise RuntimeError
    tracker.step(record(1))
    tracker.finish(failed=True)
    assert not (tmp_path / "summary.json").exists()
    assert len(read_metrics(tmp_path).steps) == 1
    assert "update" not in read_metrics(tmp_path).steps[0].seconds, "a failed stage has no time"


def test_report_says_where_time_goes(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report([str(finished)]) == 0
    shown = capsys.readouterr().out
    for text in ("Stage times", "rollout_wait", "rollout + update", "trainer waits for rollout", "tokens/s"):
        assert text in shown, text


def test_report_of_no_run_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "metrics.jsonl").mkdir(parents=True)
    for given, sentence in (
        (".", "it has no metrics.jsonl$"),
        ("nowhere", "there is nothing$"),
        ("file", "it is a file$"),
        ("folder", "metrics.jsonl cannot be read: Is a directory$"),
    ):
        with pytest.raises(ConfigError, match=rf"is not the folder of a run, such as .*: {sentence}"):
            report([str(tmp_path / given)])


def test_record_without_optional_numbers_is_fine(tmp_path: Path) -> None:
    tracker = Tracker(config(tmp_path), tmp_path)
    tracker.step(StepRecord(step=1, version=1, reward_mean=math.nan))
    tracker.finish()
    assert json.loads((tmp_path / "summary.json").read_text())["reward_first"] is None
