"""`jobs.train` as a user starts it, on the real rows of GSM8K."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_actors.config_file import load_config
from rl_actors.tracking.records import read_metrics

REPOSITORY = Path(__file__).resolve().parents[2]
GSM8K = Path(os.environ.get("RL_ACTORS_GSM8K", REPOSITORY.parent / "shared" / "data" / "gsm8k"))


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K's jsonl is not beside the repository (RL_ACTORS_GSM8K)")
def test_gsm8k_rows_through_the_whole_path(tiny_moe: Path, tmp_path: Path, run_job: Callable) -> None:
    data = tmp_path / "gsm8k data"
    files = ["--train-jsonl", str(GSM8K / "train.jsonl"), "--test-jsonl", str(GSM8K / "test.jsonl")]
    assert run_job("data", "gsm8k", "--out", str(data), *files).returncode == 0
    run_dir = tmp_path / "run"
    done = run_job(
        "train",
        "jobs/configs/gsm8k_tiny.yaml",
        f"run_dir={json.dumps(str(run_dir))}",
        f"model.path={json.dumps(str(tiny_moe))}",
        f"data.train={json.dumps(str(data / 'train.jsonl'))}",
        f"data.eval={json.dumps(str(data / 'test.jsonl'))}",
        "evaluation.prompts=8",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    records = read_metrics(run_dir).steps
    steps = load_config(REPOSITORY / "jobs" / "configs" / "gsm8k_tiny.yaml").pipeline.steps
    assert [record.step for record in records] == list(range(1, steps + 1))
    assert all(record.response_length_mean > 0 and record.sync_bytes > 0 for record in records)
    assert "prompts were left out" in done.stderr or "longer than" in done.stderr
