"""The trainer pool as real Ray actors on real bundles: two ranks, tensor parallel."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import ray
from tiny_models import huggingface_logprobs, make_batch

from placement.bundles import grant
from placement.layout import EngineLayout, MegatronLayout
from placement.plan import make_plan
from rl_actors.errors import ActorDiedError, TrainingError
from rl_actors.trainer.pool import TrainerPool, merge_logprobs

BATCH = make_batch(8)


@pytest.fixture(scope="module")
def pool(tiny_config: Any) -> Iterator[TrainerPool]:
    ray.init(address="local", num_cpus=8, include_dashboard=False)
    config = tiny_config("moe", trainer={"tp": 2}, timeouts={"start_s": 400})
    plan = make_plan(MegatronLayout.from_config(config.trainer), EngineLayout(), "cpu")
    placement = grant(plan, timeout_s=60)
    pool = TrainerPool(config, placement, "cpu", run_name="test-trainer-pool")
    try:
        asyncio.run(pool.start())
        yield pool
    finally:
        pool.actors.kill()
        placement.release()
        ray.shutdown()


def test_logprobs_come_back_in_the_batch_order(pool: TrainerPool) -> None:
    oracle = huggingface_logprobs(pool.config.model.path, BATCH, pool.config.rollout.temperature)
    assert np.abs(asyncio.run(pool.compute_logprobs(BATCH)) - oracle).max() < 1e-5


def test_a_refused_update_keeps_the_version(pool: TrainerPool) -> None:
    logprobs = asyncio.run(pool.compute_logprobs(BATCH))
    endless = np.full_like(BATCH.advantages, np.inf)
    bad = replace(BATCH, old_logprobs=logprobs, ref_logprobs=logprobs, advantages=endless)
    with pytest.raises(TrainingError, match="no step was made"):
        asyncio.run(pool.update(bad))
    assert pool.version == 0


def test_an_update_moves_the_version_and_the_model(pool: TrainerPool) -> None:
    before = asyncio.run(pool.compute_logprobs(BATCH))
    metrics = asyncio.run(pool.update(replace(BATCH, old_logprobs=before, ref_logprobs=before)))
    assert pool.version == 1
    assert metrics["grad_norm"] > 0 and metrics["lr"] == 0.01
    assert np.abs(asyncio.run(pool.compute_logprobs(BATCH)) - before).max() > 1e-4
    base = asyncio.run(pool.compute_logprobs(BATCH, adapters=False))
    np.testing.assert_array_equal(base, before)


def test_a_dead_rank_is_named_and_nobody_waits_for_it(pool: TrainerPool) -> None:
    """Last of this file: the pool is of no use after it."""
    name, actor = list(pool.actors.actors.items())[1]
    assert actor.where is not None
    os.kill(actor.where.pid, signal.SIGKILL)
    with pytest.raises(ActorDiedError, match=name):
        asyncio.run(pool.compute_logprobs(BATCH))


def test_merging_wants_every_sequence_once() -> None:
    batch = make_batch(2)
    first, second = (np.zeros(length, dtype=np.float32) for length in batch.response_lengths)
    answers = [(np.array([1]), second + 2), None, (np.array([0]), first + 1)]
    merged = merge_logprobs(batch, answers)
    np.testing.assert_array_equal(merged, np.concatenate([first + 1, second + 2]))
    with pytest.raises(ValueError, match=r"sequences \[0\]"):
        merge_logprobs(batch, answers[:2])
