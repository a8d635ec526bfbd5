"""Two real engines on their bundles: spread prompts, lose an engine, take it back after a sync."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from placement.bundles import BundleSpot, Placement, grant
from placement.layout import EngineLayout, MegatronLayout
from placement.plan import make_plan
from rl_actors.errors import ActorDiedError, ConfigError
from rl_actors.rollout.pool import RolloutPool
from rl_actors.rollout.samples import Sampling
from tests.rollout.tiny_rollout import make_prompt, reference_logprobs, run_config

LONG = Sampling(1.0, 240)


@pytest.fixture(scope="module")
def run():
    """Runs coroutines of all tests in one event loop, as a driver does."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def pool(ray_cluster, dense_model, run):
    config = run_config(dense_model, engines=2)
    plan = make_plan(MegatronLayout(), EngineLayout(2, 1), "cpu", cpus_per_bundle=1)
    placement = grant(plan, timeout_s=60)
    pool = RolloutPool(config, placement, "cpu", "rollout-test")
    run(pool.start())
    yield pool
    run(pool.actors.akill())
    placement.release()


def test_prompts_are_spread_and_answers_are_those_of_the_model(pool, run, dense_model):
    prompts = [make_prompt(f"spread-{index}") for index in range(8)]

    async def sample():
        groups = await asyncio.gather(*(pool.generate(prompt, 4, 1) for prompt in prompts))
        each = await asyncio.gather(*(pool._call(one, "stats", timeout_s=30) for one in pool._engines.values()))
        return groups, [stats["tokens"] for stats in each], await pool.stats()

    groups, tokens, together = run(sample())
    assert min(tokens) > 0.2 * sum(tokens)
    assert together["tokens"] == sum(tokens) == sum(len(one.token_ids) for group in groups for one in group)
    assert together["serving"] == 2 and together["lost_requests"] == 0
    for prompt, group in zip(prompts[:3], groups, strict=False):
        assert [one.prompt_id for one in group] == [prompt.id] * 4
        expected = reference_logprobs(dense_model, prompt, group[0].token_ids)
        np.testing.assert_allclose(group[0].logprobs, expected, atol=1e-5, rtol=0)


def test_a_seed_fixes_the_answers_whichever_engine_samples_them(pool, run):
    prompt = make_prompt("either")

    async def sample():
        return await asyncio.gather(*(pool.generate(prompt, 3, 7) for _ in range(4)))

    first, *others = run(sample())
    for other in others:
        for left, right in zip(first, other, strict=True):
            np.testing.assert_array_equal(left.token_ids, right.token_ids)


def test_an_evaluation_takes_the_most_likely_tokens(pool, run):
    prompt = make_prompt("greedy")
    greedy = pool._sampling.with_temperature(0.0)
    left, right = run(pool.generate(prompt, 2, 3, greedy))
    np.testing.assert_array_equal(left.token_ids, right.token_ids)


def test_a_prompts_own_fault_is_not_the_engines(pool, run):
    with pytest.raises(ConfigError, match="'too-long' has 256 tokens"):
        run(pool.generate(make_prompt("too-long", 256), 1, 0))
    assert set(pool.states().values()) == {"serving"}


def test_a_pause_holds_all_engines_and_a_version_reaches_all(pool, run):
    async def versions():
        await pool.pause()
        calls = [asyncio.create_task(pool.generate(make_prompt(f"pause-{i}"), 2, 0)) for i in range(4)]
        done, _ = await asyncio.wait(calls, timeout=0.5)
        assert not done
        await pool.resume(5)
        return [one.versions for group in await asyncio.gather(*calls) for one in group]

    assert {int(version) for each in run(versions()) for version in each} == {5}


# From here on engines are lost.


def test_prompts_of_a_lost_engine_are_answered_by_the_others(pool, run, caplog):
    victim = pool.actors.actors["engine-1/worker-0"]

    async def lose():
        calls = [asyncio.create_task(pool.generate(make_prompt(f"lost-{i}"), 8, 0, LONG)) for i in range(6)]
        while pool._engines["engine-1"].answers_under_way < 24:
            await asyncio.sleep(0.01)
        os.kill(victim.where.pid, signal.SIGKILL)
        return await asyncio.gather(*calls)

    groups = run(lose())
    assert [len(group) for group in groups] == [8] * 6
    assert pool.lost_requests == 3 and pool.lost_engines == 1
    assert pool.states() == {"engine-0": "serving", "engine-1": "dead"}
    assert "engine-1 is lost" in caplog.text and "bundle engine-1/bundle-0" in caplog.text
    # A dead engine neither holds a pause up nor gets a prompt.
    run(pool.pause())
    run(pool.resume(6))
    assert run(pool.generate(make_prompt("after"), 1, 0))[0].oldest_version == 6


def test_a_new_engine_serves_only_after_a_sync(pool, run):
    assert run(pool.restart_dead()) == ["engine-1"]
    assert pool.states() == {"engine-0": "serving", "engine-1": "behind"}
    assert pool.actors.actors["engine-1/worker-0"].where.pid != os.getpid()

    async def answered_by():
        await asyncio.gather(*(pool.generate(make_prompt(f"who-{i}"), 2, i) for i in range(6)))
        stats = await pool._call(pool._engines["engine-1"], "stats", timeout_s=30)
        return stats["tokens"]

    assert run(answered_by()) == 0
    run(pool.pause())
    run(pool.resume(7))
    assert set(pool.states().values()) == {"serving"}
    assert run(answered_by()) > 0


def test_without_an_engine_the_error_says_what_to_do(pool, run):
    async def lose_all():
        call = asyncio.create_task(pool.generate(make_prompt("alone"), 4, 0, LONG))
        await asyncio.sleep(0.05)
        for actor in pool.actors.actors.values():
            os.kill(actor.where.pid, signal.SIGKILL)
        await call

    with pytest.raises(ActorDiedError, match="no engine is left to sample: engine-0, engine-1 died; restart them"):
        run(lose_all())


def test_an_engine_of_several_gpus_leaves_them_to_vllms_workers():
    """On paper: where the actor sits, and what vLLM is told about the bundles of its workers."""
    plan = make_plan(MegatronLayout(), EngineLayout(1, 2), "gpu")
    spots = {"engine-0": [BundleSpot(1, "node", ("4",)), BundleSpot(0, "node", ("5",))]}
    placement = Placement(plan, {"engine-0": object()}, spots)  # type: ignore[dict-item]
    pool = RolloutPool(run_config(Path("model"), tp=2), placement, "gpu", "tp2")
    (spec,) = pool.actors.specs.values()
    assert spec.name == "engine-0/worker-0"
    assert spec.env_vars["VLLM_RAY_BUNDLE_INDICES"] == "1,0"
    assert spec.env_vars["VLLM_RAY_PER_WORKER_GPUS"] == "1.0"
    options = pool.actors.placement.actor_options("engine-0/worker-0")
    assert options["num_gpus"] == 0 and options["scheduling_strategy"].placement_group_bundle_index == 1
