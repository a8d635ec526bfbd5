"""`jobs.train` as a user starts it: killed and resumed, and on the real rows of GSM8K."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from rl_actors.config_file import load_config
from rl_actors.tracking.records import read_metrics

REPOSITORY = Path(__file__).resolve().parents[2]
GSM8K = Path(os.environ.get("RL_ACTORS_GSM8K", REPOSITORY.parent / "shared" / "data" / "gsm8k"))
TOLERANCE = 1e-6
STEPS = 6
KILL_AFTER = 3
REWARD = "tests.driver.length_reward:shorter_is_better"


def synchronous_recipe(model: Path, run_dir: Path) -> list[str]:
    return [
        "jobs/configs/quickstart.yaml",
        f"run_dir={json.dumps(str(run_dir))}",
        f"model.path={json.dumps(str(model))}",
        f"data={{train: {json.dumps(str(model / 'train.jsonl'))}, eval: {json.dumps(str(model / 'eval.jsonl'))}}}",
        "pipeline={steps: 6, prompts_per_step: 4, samples_per_prompt: 4, max_staleness: 0}",
        f"reward={{function: {REWARD}}}",
        "checkpoint.every_steps=1",
        "evaluation.prompts=8",
        "tracking.wandb=off",
    ]


def kill_after_step(arguments: list[str], run_dir: Path, step: int) -> None:
    """Start the job and SIGKILL it with all its processes once the checkpoint of `step` is sealed."""
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    process = subprocess.Popen(
        [sys.executable, "-m", "jobs.train", *arguments],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 300
    pointer = run_dir / "checkpoints" / "latest"
    while not (pointer.exists() and int(pointer.read_text().removeprefix("step-")) >= step):
        assert process.poll() is None, "the job ended before it was killed"
        assert time.monotonic() < deadline, "the job made no progress"
        time.sleep(0.01)
    family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    for pid in family:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait(timeout=30)


def test_killed_and_resumed_is_as_unbroken(tiny_moe: Path, tmp_path: Path, run_job: Callable) -> None:
    unbroken, broken = tmp_path / "unbroken run", tmp_path / "broken run"
    done = run_job("train", *synchronous_recipe(tiny_moe, unbroken))
    assert done.returncode == 0, done.stderr[-3000:]
    kill_after_step(synchronous_recipe(tiny_moe, broken), broken, KILL_AFTER)
    assert not (broken / "summary.json").exists()
    done = run_job("train", *synchronous_recipe(tiny_moe, broken))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "going on after step" in done.stderr + done.stdout

    expected, got = read_metrics(unbroken), read_metrics(broken)
    assert [record.step for record in got.steps] == list(range(1, STEPS + 1))
    losses = [record.loss for record in expected.steps]
    assert np.ptp(losses) > 1e-3
    np.testing.assert_allclose([record.loss for record in got.steps], losses, rtol=0, atol=TOLERANCE)
    assert got.evals[-1].value == pytest.approx(expected.evals[-1].value, abs=TOLERANCE)
    summary = json.loads((broken / "summary.json").read_text())
    assert summary["steps"] == STEPS and summary["versions_published"] == STEPS
    assert summary["max_staleness_seen"] == 0


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
