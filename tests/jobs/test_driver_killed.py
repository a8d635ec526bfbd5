"""The driver actor is killed in the middle of a weight sync: nothing stays behind, and the same job goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from rl_actors.tracking.records import read_metrics

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 3


@pytest.fixture
def cluster() -> Iterator[str]:
    """The address of a cluster that outlives jobs, as a user's does."""
    context: Any = ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield context.address_info["address"]
    ray.shutdown()


def start_job(recipe: list[str], address: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "jobs.train", *recipe],
        cwd=REPOSITORY,
        env={**os.environ, "RAY_ADDRESS": address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(what: Callable[[], Any], process: subprocess.Popen[str] | None, seconds: float, name: str) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert process is None or process.poll() is None, f"the job ended while waiting for {name}"
        assert time.monotonic() < deadline, f"no {name} within {seconds:g} s"
        time.sleep(0.005)
    return found


def named_actor(name: str) -> Any:
    for known in ray.util.list_named_actors(all_namespaces=True):
        if known["name"].endswith(name):
            return ray.get_actor(known["name"], namespace=known["namespace"])
    return None


def processes(*classes: str) -> list[psutil.Process]:
    """The living processes of this cluster's actors of these classes."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if title.startswith(tuple(f"ray::{name}" for name in classes)):
            found.append(process)
    return found


def free_cpus() -> float:
    return float(ray.available_resources().get("CPU", 0.0))


def test_nothing_stays_behind_and_the_job_goes_on(tiny_moe: Path, tmp_path: Path, cluster: str) -> None:
    run_dir = tmp_path / "run"
    recipe = [
        "jobs/configs/quickstart.yaml",
        f"run_dir={json.dumps(str(run_dir))}",
        f"model.path={json.dumps(str(tiny_moe))}",
        f"data={{train: {json.dumps(str(tiny_moe / 'train.jsonl'))}}}",
        f"pipeline={{steps: {STEPS}, prompts_per_step: 4, samples_per_prompt: 4, max_staleness: 0}}",
        "reward={function: tests.driver.length_reward:shorter_is_better}",
        "checkpoint.every_steps=1",
        "sync.bucket_mib=1",
        "tracking.wandb=off",
    ]
    actors = ("MegatronWorker", "RolloutEngine", "RewardWorker", "Driver")
    everything = free_cpus()
    job = start_job(recipe, cluster)
    try:
        wait_for((run_dir / "checkpoints" / "step-000001").exists, job, 200, "first checkpoint")
        engine = named_actor("engine-0/worker-0")
        wait_for(
            lambda: ray.get(engine.health.options(concurrency_group="control").remote())["state"] == "paused",
            job,
            60,
            "pause of the engine",
        )
        (driver,), (rank,) = processes("Driver"), processes("MegatronWorker")
        # Held where it is, so that the sync cannot end before the driver does.
        rank.send_signal(signal.SIGSTOP)
        driver.kill()
        rank.send_signal(signal.SIGCONT)
        output, _ = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode == 1 and "the driver actor died" in output
    wait_for(lambda: not processes(*actors), None, 30, "end of the actors")
    wait_for(lambda: free_cpus() == everything, None, 30, "return of the bundles")

    again = start_job(recipe, cluster)
    output, _ = again.communicate(timeout=200)
    assert again.returncode == 0, output[-3000:]
    assert "going on after step" in output
    records = read_metrics(run_dir).steps
    assert [record.step for record in records] == list(range(1, STEPS + 1))
