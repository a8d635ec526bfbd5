"""One run, broken twice and started again with the same command, trains as an unbroken one.

First its driver actor is killed in the middle of a weight sync: nothing stays behind, and it goes on from its run
folder. Then every process of the machine is killed and the run folder is lost: it goes on from `checkpoint.storage`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from rl_actors.driver.checkpoint_store import CheckpointStore
from rl_actors.tracking.records import read_metrics

REPOSITORY = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-6
STEPS = 6
STORED = 3
"""The machine is lost when the storage holds this step, or the next one."""
ACTORS = ("MegatronWorker", "RolloutEngine", "RewardWorker", "Driver")


@pytest.fixture
def cluster() -> Iterator[str]:
    """The address of a cluster that outlives jobs, as a user's does."""
    context: Any = ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield context.address_info["address"]
    ray.shutdown()


class Job:
    """`python -m jobs.train` in its own process, with all it says in one file."""

    def __init__(self, arguments: list[str], address: str, log: Path) -> None:
        self.log = log
        command = [sys.executable, "-m", "jobs.train", *arguments]
        environment = {**os.environ, "RAY_ADDRESS": address}
        with log.open("w") as file:
            self.process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=file, stderr=file)

    def wait_for(self, what: Callable[[], Any], seconds: float, name: str) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := what()):
            assert self.process.poll() is None, f"the job ended while waiting for {name}: {self.said()[-3000:]}"
            assert time.monotonic() < deadline, f"no {name} within {seconds:g} s"
            time.sleep(0.005)
        return found

    def said(self) -> str:
        return self.log.read_text()

    def ends_with(self, code: int) -> None:
        assert self.process.wait(timeout=240) == code, self.said()[-3000:]

    def kill(self) -> None:
        """SIGKILL to the job and all its processes, those of a cluster of its own included."""
        if self.process.poll() is None:
            for one in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
                try:
                    os.kill(one.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self.process.wait(timeout=30)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[list[str], str], Job]]:
    """`start(recipe, cluster's address)`; what still runs at the end of the test is killed."""
    jobs: list[Job] = []

    def start_one(recipe: list[str], address: str) -> Job:
        jobs.append(Job(recipe, address, tmp_path / f"job {len(jobs)}.log"))
        return jobs[-1]

    yield start_one
    for job in jobs:
        job.kill()


def recipe_for(model: Path, run_dir: Path, *more: str) -> list[str]:
    return [
        "jobs/configs/quickstart.yaml",
        f"run_dir={json.dumps(str(run_dir))}",
        f"model.path={json.dumps(str(model))}",
        f"data={{train: {json.dumps(str(model / 'train.jsonl'))}, eval: {json.dumps(str(model / 'eval.jsonl'))}}}",
        f"pipeline={{steps: {STEPS}, prompts_per_step: 4, samples_per_prompt: 4, max_staleness: 0}}",
        "reward={function: tests.driver.length_reward:shorter_is_better}",
        "checkpoint.every_steps=1",
        "evaluation.prompts=8",
        "sync.bucket_mib=1",
        "tracking.wandb=off",
        *more,
    ]


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


def wait_until(what: Callable[[], bool], seconds: float, name: str) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, f"no {name} within {seconds:g} s"
        time.sleep(0.05)


def kill_driver_in_mid_sync(job: Job, run_dir: Path) -> None:
    job.wait_for((run_dir / "checkpoints" / "step-000001").exists, 200, "first checkpoint")
    (driver,), (rank,) = processes("Driver"), processes("MegatronWorker")

    def held_while_sending() -> bool:
        """Ray names a process after the method that runs in it."""
        if not sends(rank):
            return False
        rank.send_signal(signal.SIGSTOP)
        if not sends(rank):
            rank.send_signal(signal.SIGCONT)
        return sends(rank)

    job.wait_for(held_while_sending, 60, "rank that sends weights")
    driver.kill()
    rank.send_signal(signal.SIGCONT)


def sends(rank: psutil.Process) -> bool:
    return " ".join(rank.cmdline()).startswith("ray::MegatronWorker.weights")


def latest_step(checkpoints: Path) -> int:
    pointer = checkpoints / "latest"
    name = pointer.read_text() if pointer.exists() else ""  # the storage replaces it by writing anew
    return CheckpointStore.step_of(Path(name)) if name else 0


def test_broken_by_a_dead_driver_and_a_lost_machine_it_is_as_unbroken(
    tiny_moe: Path, tmp_path: Path, cluster: str, start: Callable[[list[str], str], Job]
) -> None:
    run_dir, store = tmp_path / "broken run", tmp_path / "a store"
    recipe = recipe_for(tiny_moe, run_dir, f"checkpoint.storage={json.dumps(str(store))}")
    everything = free_cpus()
    job = start(recipe, cluster)
    kill_driver_in_mid_sync(job, run_dir)
    job.ends_with(1)
    assert "the driver actor died" in job.said()
    wait_until(lambda: not processes(*ACTORS), 30, "end of the actors")
    wait_until(lambda: free_cpus() == everything, 30, "return of the bundles")

    unbroken = start(recipe_for(tiny_moe, tmp_path / "unbroken run"), cluster)
    job = start(recipe, "local")
    job.wait_for(lambda: latest_step(store / run_dir.name) >= STORED, 200, f"step {STORED} in the storage")
    job.kill()
    assert "going on after step" in job.said() and "fetched" not in job.said()
    unbroken.ends_with(0)
    before, kept = read_metrics(run_dir), latest_step(store / run_dir.name)
    assert not (run_dir / "summary.json").exists()
    shutil.rmtree(run_dir)

    job = start(recipe, cluster)
    job.ends_with(0)
    assert f"fetched step-{kept:06d} from {store}" in job.said()
    assert f"going on after step {kept} from" in job.said()
    after, expected = read_metrics(run_dir), read_metrics(tmp_path / "unbroken run")
    records = [*before.steps[:kept], *after.steps]
    assert [record.step for record in records] == list(range(1, STEPS + 1))
    losses = [record.loss for record in expected.steps]
    assert np.ptp(losses) > 1e-3
    np.testing.assert_allclose([record.loss for record in records], losses, rtol=0, atol=TOLERANCE)
    assert before.evals[0].value == pytest.approx(expected.evals[0].value, abs=TOLERANCE)
    assert after.evals[-1].value == pytest.approx(expected.evals[-1].value, abs=TOLERANCE)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == STEPS and summary["versions_published"] == STEPS
    assert summary["max_staleness_seen"] == 0
