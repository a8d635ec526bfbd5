"""metrics.jsonl holds every step once, whatever killed the run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from rl_actors.errors import ConfigError
from rl_actors.tracking.records import EvalRecord, MetricsWriter, StepRecord, read_metrics


def step(number: int, **values: object) -> StepRecord:
    return StepRecord(step=number, version=number, reward_mean=number / 10, **values)  # type: ignore[arg-type]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    record = step(
        1,
        loss=np.float32(0.5),
        kl=math.nan,
        grad_norm=math.inf,
        seconds={"update": 1.5, "sync": 0.25},
        tis={"mean": np.float64(0.9), "max": math.nan},
        step_s=2.0,
        tokens_trained=np.int64(300),
    )
    with MetricsWriter(tmp_path) as writer:
        writer.write(EvalRecord(step=0, value=0.25))
        writer.write(record)
    metrics = read_metrics(tmp_path)
    (read,) = metrics.steps
    assert (read.loss, read.sync_s, read.tokens_per_s) == (0.5, 0.25, 150.0)
    assert math.isnan(read.kl) and math.isnan(read.grad_norm) and math.isnan(read.tis["max"])
    assert metrics.evals == [EvalRecord(step=0, value=0.25)]
    # Every line is JSON for any reader, not only for Python's, which knows NaN.
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_torn_last_line_is_left_out_and_cut_on_resume(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for number in (1, 2, 3):
            writer.write(step(number))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert [record.step for record in read_metrics(tmp_path).steps] == [1, 2]
    with MetricsWriter(tmp_path, resume_step=2) as writer:
        writer.write(step(3))
    assert [record.step for record in read_metrics(tmp_path).steps] == [1, 2, 3]


def test_resume_cuts_what_lies_behind_the_checkpoint(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(EvalRecord(step=0, value=0.1))
        for number in (1, 2, 3, 4):
            writer.write(step(number))
        writer.write(EvalRecord(step=4, value=0.4))
    MetricsWriter(tmp_path, resume_step=2).close()
    metrics = read_metrics(tmp_path)
    assert [record.step for record in metrics.steps] == [1, 2]
    assert [record.step for record in metrics.evals] == [0]


def test_new_run_keeps_the_earlier_file_aside(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(step(7))
    MetricsWriter(tmp_path).close()
    assert read_metrics(tmp_path).steps == []
    assert '"step": 7' in (tmp_path / "metrics.previous.jsonl").read_text()


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[]",
        "{}",
        "[" * 100_000,
        '{"kind": "step", "step": "many"}',
        '{"kind": "step", "step": 1}',
        '{"kind": "step", "step": 1, "version": 1, "reward_mean": "high"}',
        '{"kind": "step", "step": 1, "version": 1, "reward_mean": 1, "seconds": [1]}',
    ],
)
def test_what_is_no_record_is_named_by_its_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "eval", "step": 0, "value": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 2 is not .*: remove it to read") as caught:
        read_metrics(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "eval", "step": 0, "value": 1}\n' + line)  # torn by a kill
    assert [record.step for record in read_metrics(tmp_path).evals] == [0]


def test_frame_has_one_column_per_number(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(step(1, seconds={"update": 1.0}, extra={"clip_fraction": 0.1}))
        writer.write(step(2, seconds={"update": 2.0, "sync": 0.5}))
    frame = read_metrics(tmp_path).frame()
    assert list(frame["seconds/update"]) == [1.0, 2.0]
    assert frame["seconds/sync"].isna().tolist() == [True, False]
    assert "extra/clip_fraction" in frame and "tokens_per_s" in frame
