"""Calls to real actors end: with answers, or with an error that names the late or dead one."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import numpy as np
import pytest
import ray

from placement.bundles import grant
from placement.layout import EngineLayout, MegatronLayout
from placement.plan import make_plan
from rl_actors.errors import ActorDiedError, ActorLateError, TrainingError
from rl_actors.pool import ActorPool, ActorSpec


class Worker:
    def __init__(self, rank: int, fault: str = "") -> None:
        if fault:
            raise ValueError(fault)
        self.rank = rank
        self.awake = threading.Event()

    def add(self, array: np.ndarray, offset: int = 0) -> float:
        return float(array.sum()) + self.rank + offset

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def sleep(self, *seconds: float) -> bool:
        """Wait, the first rank for the first of the times, until woken."""
        woken = self.awake.wait(seconds[min(self.rank, len(seconds) - 1)])
        self.awake.clear()
        return woken

    def wake(self) -> None:
        self.awake.set()

    def rest(self) -> None:
        self.awake.clear()

    def die_if(self, rank: int) -> None:
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        self.sleep(60)

    def fail_if(self, rank: int) -> None:
        if self.rank == rank:
            raise TrainingError("the loss is not finite")
        self.sleep(60)


class AsyncWorker:
    async def slow(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds


@pytest.fixture(scope="module")
def placement():
    ray.init(address="local", num_cpus=8, num_gpus=0, include_dashboard=False, log_to_driver=False)
    granted = grant(make_plan(MegatronLayout(tp=2), EngineLayout(1, 2), "cpu"), timeout_s=60)
    yield granted
    granted.release()
    ray.shutdown()


@pytest.fixture(scope="module")
def started_pool(placement):
    specs = [
        ActorSpec(name, args=(rank,), env_vars={"OMP_NUM_THREADS": "1", "RANK_NAME": f"r{rank}"})
        for rank, name in enumerate(placement.plan.trainer_actors)
    ]
    pool = ActorPool(Worker, specs, "test-run", placement)
    pool.start(timeout_s=60)
    yield pool
    pool.kill()


@pytest.fixture
def pool(started_pool):
    """One pool for all tests; a test that leaves a survivor waiting gets it woken here."""
    yield started_pool
    started_pool.call("wake", timeout_s=20, control=True)
    started_pool.call("rest", timeout_s=20)


def test_answers_come_in_the_order_of_the_actors(pool, placement):
    array = np.ones(1000, dtype=np.float32)
    assert pool.call("add", array, timeout_s=30) == [1000, 1001]
    assert pool.call("add", array, timeout_s=30, per_actor=[(5,), (7,)]) == [1005, 1008]
    assert pool.call("environment", "RANK_NAME", timeout_s=30) == ["r0", "r1"]
    second = placement.plan.trainer_actors[1]
    assert pool.call("add", array, timeout_s=30, only=[second]) == [1001]
    assert asyncio.run(pool.acall("add", array, timeout_s=30)) == [1000, 1001]


def test_actors_are_named_placed_and_know_where_they_are(pool, placement):
    name = placement.plan.trainer_actors[1]
    assert ray.get_actor(f"test-run/{name}") is not None
    where = pool.actors[name].where
    assert where.bundle_index == 1 and where.pid != os.getpid()
    assert where.placement_group_id == placement.groups["trainer-0"].id.hex()


def test_control_calls_get_through_a_long_call(pool):
    async def wake_from_outside() -> list[bool]:
        call = asyncio.create_task(pool.acall("sleep", 60, timeout_s=60))
        await pool.acall("ping", timeout_s=20, control=True)
        await pool.acall("wake", timeout_s=20, control=True)
        return await call

    started = time.monotonic()
    assert asyncio.run(wake_from_outside()) == [True, True]
    assert time.monotonic() - started < 40


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_late_actor_is_named_with_bundle_and_stage(pool, asynchronous):
    with pytest.raises(ActorLateError) as caught:
        _call(pool, asynchronous, "sleep", 0, 60, timeout_s=1.5)
    message = str(caught.value)
    assert "sleep did not end within 1.5 s on actor trainer-0/rank-1 tp1" in message
    assert "trainer-0/bundle-1" in message and "rank-0" not in message
    pool.ping(timeout_s=20)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_first_death_ends_the_call_and_the_actor_comes_back_to_its_bundle(pool, asynchronous):
    started = time.monotonic()
    with pytest.raises(ActorDiedError, match=r"trainer-0/rank-1 .*bundle trainer-0/bundle-1 died in die_if"):
        _call(pool, asynchronous, "die_if", 1, timeout_s=50)
    assert time.monotonic() - started < 30
    name = next(name for name in pool.actors if "rank-1" in name)
    old = pool.actors[name].where
    if asynchronous:
        asyncio.run(pool.arestart(name, timeout_s=60))
    else:
        pool.restart(name, timeout_s=60)
    new = pool.actors[name].where
    assert new.pid != old.pid and new.bundle_index == old.bundle_index
    assert pool.call("add", np.ones(1), timeout_s=30, only=[name]) == [2]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_methods_own_error_keeps_its_type_and_names_the_actor(pool, asynchronous):
    started = time.monotonic()
    with pytest.raises(TrainingError, match="not finite") as caught:
        _call(pool, asynchronous, "fail_if", 0, timeout_s=50)
    assert any("rank-0" in note for note in caught.value.__notes__)
    assert time.monotonic() - started < 30


def test_the_event_loop_goes_on_during_a_call(pool):
    async def ticks_during_a_call() -> int:
        call = asyncio.create_task(pool.acall("sleep", 1.0, timeout_s=30))
        ticks = 0
        while not call.done():
            await asyncio.sleep(0.05)
            ticks += 1
        return ticks

    assert asyncio.run(ticks_during_a_call()) >= 10


def test_a_failed_start_says_why_and_leaves_nothing(placement):
    names = placement.plan.engine_actors[0]
    specs = [ActorSpec(names[0], args=(0,)), ActorSpec(names[1], args=(1, "no such model folder"))]
    pool = ActorPool(Worker, specs, "broken", placement)
    with pytest.raises(ActorDiedError, match=r"engine-0/worker-1 .*not started yet.*ValueError: no such model folder"):
        pool.start(timeout_s=60)
    assert pool.actors == {}
    with pytest.raises(ActorDiedError, match="is not running"):
        pool.call("add", np.ones(1), timeout_s=5)


def test_a_pool_that_does_not_fit_is_late_not_hanging(placement):
    """Actors without a bundle of their own ask Ray for what is left, here for more than there is."""
    pool = ActorPool(Worker, [ActorSpec("big", args=(0,), num_cpus=64)], "toobig")
    with pytest.raises(ActorLateError, match=r"actor big .*not started yet"):
        pool.start(timeout_s=1)


def test_async_actors_overlap_their_calls(placement):
    async def together() -> float:
        pool = ActorPool(AsyncWorker, [ActorSpec("reward-0")], "overlap")
        await pool.astart(timeout_s=60)
        started = time.monotonic()
        await asyncio.gather(*(pool.acall("slow", 1.0, timeout_s=30) for _ in range(8)))
        elapsed = time.monotonic() - started
        await pool.acall("ping", timeout_s=10, control=True)
        await pool.akill()
        return elapsed

    assert asyncio.run(together()) < 5


def _call(pool, asynchronous, method, *args, timeout_s):
    if asynchronous:
        return asyncio.run(pool.acall(method, *args, timeout_s=timeout_s))
    return pool.call(method, *args, timeout_s=timeout_s)
