"""One real engine with a tiny Qwen3-MoE: its numbers against transformers, its weight versions, and its failures."""

from __future__ import annotations

import time

import numpy as np
import pytest
import ray

from rl_actors.errors import ActorDiedError, ActorLateError, ConfigError, RLActorsError, SyncError
from rl_actors.pool import ActorPool, ActorSpec
from rl_actors.rollout.engine import RolloutEngine
from rl_actors.rollout.samples import Sampling
from rl_actors.rollout.vllm_settings import engine_environment
from tests.rollout.tiny_rollout import EOS, make_model, make_prompt, reference_logprobs, run_config

LONG = Sampling(1.0, 240)
START_S = 600.0


class Engine:
    """Calls to the actor, blocking, with a bound."""

    def __init__(self, handle) -> None:
        self.handle = handle

    def __getattr__(self, method):
        return lambda *args, **kwargs: ray.get(self.begin(method, *args, **kwargs), timeout=START_S)

    def begin(self, method, *args, **kwargs):
        return getattr(self.handle, method).remote(*args, **kwargs)

    def sample(self, prompt, samples=1, seed=0, sampling=None):
        return self.generate_one(prompt, samples, seed, sampling)

    def wait_for_tokens(self, count):
        """Return when so many more tokens are sampled."""
        target, deadline = self.stats()["tokens"] + count, time.monotonic() + 60
        while self.stats()["tokens"] < target:
            assert time.monotonic() < deadline, "the engine stopped sampling"
            time.sleep(0.01)

    def load(self, model, version):
        """New weights from a folder, between two steps."""
        self.pause()
        self.collective_rpc("reload_weights", weights_path=str(model))
        self.resume(version)


def make_engine(model, **rollout):
    spec = ActorSpec(
        "engine-0", ("engine-0", run_config(model, **rollout), "cpu"), env_vars=engine_environment("cpu", 1)
    )
    pool = ActorPool(RolloutEngine, [spec], "engine-test")
    pool.start(timeout_s=START_S)
    pool.call("start", timeout_s=START_S)
    return pool


@pytest.fixture(scope="module")
def engine(ray_cluster, moe_model):
    pool = make_engine(moe_model)
    yield Engine(pool.actors["engine-0"].handle)
    pool.kill()


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("other") / "model", "moe", seed=1)


def same(left, right):
    """Equal tokens, and logprobs equal up to rounding."""
    np.testing.assert_array_equal(left.token_ids, right.token_ids)
    agree(left.logprobs, right.logprobs)


def agree(logprobs, expected):
    np.testing.assert_allclose(logprobs, expected, atol=1e-5, rtol=0)


# Numbers


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_transformers_at_the_sampling_temperature(engine, moe_model, temperature):
    prompt = make_prompt("logprobs")
    for trajectory in engine.sample(prompt, samples=4, sampling=Sampling(temperature, 20)):
        expected = reference_logprobs(moe_model, prompt, trajectory.token_ids, temperature)
        agree(trajectory.logprobs, expected)


def test_answers_end_at_the_stop_token_or_at_the_length(engine):
    trajectories = engine.sample(make_prompt("ends"), samples=64, sampling=LONG)
    stopped = [one for one in trajectories if one.finish_reason == "stop"]
    assert len(stopped) > 8, "an untrained model ends most answers within 240 tokens"
    for one in trajectories:
        assert (one.token_ids[-1] == EOS) == (one.finish_reason == "stop")
        assert EOS not in one.token_ids[:-1]
        assert len(one.token_ids) == 240 or one.finish_reason == "stop"
        assert len(one.text) == len(one.token_ids) - int(np.isin(one.token_ids, [0, 1, 2]).sum())


def test_a_stop_string_ends_an_answer_and_stays_in_it(engine):
    for one in engine.sample(make_prompt("strings"), samples=16, sampling=Sampling(1.0, 240, stop=("a", "b"))):
        assert one.finish_reason == "stop"
        found = [one.text.find(letter) for letter in "ab" if letter in one.text]
        assert found == [len(one.text) - 1] or one.token_ids[-1] == EOS


def test_an_answer_is_cut_where_the_context_ends(engine):
    (one,) = engine.sample(make_prompt("full", 250), sampling=Sampling(0.0, 100))
    assert one.finish_reason == "length" and len(one.token_ids) == 6


# Randomness


def test_a_seed_fixes_the_answers_whatever_else_is_in_the_batch(engine):
    prompt = make_prompt("seeds")
    alone = engine.sample(prompt, samples=3, seed=5)
    others = [engine.begin("generate_one", make_prompt(f"other-{i}"), 4, i) for i in range(5)]
    greedy = engine.begin("generate_one", make_prompt("greedy"), 1, 0, Sampling(0.0, 30))
    crowded = engine.sample(prompt, samples=5, seed=5)
    ray.get([*others, greedy])
    for left, right in zip(alone, crowded, strict=False):
        same(left, right)
    assert len({tuple(one.token_ids) for one in crowded}) == 5
    assert any(
        (a.token_ids[:3] != b.token_ids[:3]).any() for a, b in zip(alone, engine.sample(prompt, 3, 6), strict=True)
    )


def test_prompts_of_one_call_come_back_in_order(engine):
    prompts = [make_prompt(f"order-{i}", length) for i, length in enumerate((30, 5, 12))]
    groups = engine.generate(prompts, 2, 1)
    assert [[one.prompt_id for one in group] for group in groups] == [[prompt.id] * 2 for prompt in prompts]
    for prompt, group in zip(prompts, groups, strict=True):
        for left, right in zip(group, engine.sample(prompt, 2, 1), strict=True):
            same(left, right)


# Continuous batching


def test_a_late_short_request_overtakes_an_early_long_one(engine):
    early = engine.begin("generate_one", make_prompt("early"), 8, 0, LONG)
    engine.wait_for_tokens(20)
    late = engine.begin("generate_one", make_prompt("late"), 2, 0, Sampling(1.0, 3))
    first, _ = ray.wait([early, late], num_returns=1, timeout=60)
    assert first == [late]
    assert len(ray.get(early, timeout=60)) == 8


# Weight versions


def test_tokens_carry_the_version_that_sampled_them_across_a_pause(engine, moe_model, other_weights):
    prompt = make_prompt("versions", 40)
    engine.load(moe_model, 10)
    running = engine.begin("generate_one", prompt, 16, 3, LONG)
    engine.wait_for_tokens(32)
    engine.pause()
    sampled = engine.stats()["tokens"]
    waiting = engine.begin("generate_one", prompt, 1, 4)
    engine.collective_rpc("reload_weights", weights_path=str(other_weights))
    time.sleep(0.2)
    assert engine.stats()["tokens"] == sampled, "nothing is sampled during a pause"
    assert engine.health()["state"] == "paused"
    engine.resume(11)
    trajectories = ray.get(running, timeout=60)
    across = [one for one in trajectories if set(one.versions) == {10, 11}]
    assert len(across) > 4 and all((np.diff(one.versions) >= 0).all() for one in trajectories)
    for one in across[:3]:
        before = one.versions == 10
        agree(one.logprobs[before], reference_logprobs(moe_model, prompt, one.token_ids)[before])
    # Accepted before the change, started after it: it must not see the KV that the running requests left in the cache.
    (after,) = ray.get(waiting, timeout=60)
    assert set(after.versions) == {11}
    agree(after.logprobs, reference_logprobs(other_weights, prompt, after.token_ids))


def test_the_prefix_cache_never_serves_older_weights(engine, moe_model, other_weights):
    prompt = make_prompt("cache", 100)
    engine.load(moe_model, 20)
    (old,) = engine.sample(prompt)
    hits = engine.stats()["prefix_hit_rate"]
    (again,) = engine.sample(prompt)
    same(old, again)
    assert engine.stats()["prefix_hit_rate"] > hits, "the cache is in use"
    # A request in flight keeps its blocks, so the cache cannot be emptied at this change.
    holder = engine.begin("generate_one", prompt, 16, 9, LONG)
    engine.wait_for_tokens(16)
    engine.load(other_weights, 21)
    (new,) = engine.sample(prompt)
    agree(new.logprobs, reference_logprobs(other_weights, prompt, new.token_ids))
    assert np.abs(reference_logprobs(moe_model, prompt, new.token_ids) - new.logprobs).max() > 0.01
    # Back to the first weights under a number that was used before: the cache of version 20 is theirs no more.
    engine.load(moe_model, 20)
    (back,) = engine.sample(prompt)
    same(old, back)
    ray.get(holder, timeout=60)


def test_preempted_requests_start_again_with_the_new_weights(engine, moe_model, other_weights):
    """More requests than the KV cache holds: vLLM takes some back, and a change of weights comes in between."""
    prompt = make_prompt("preempted", 60)
    engine.load(moe_model, 30)
    references = [engine.begin("generate_one", make_prompt(f"filler-{i}", 150), 32, i, LONG) for i in range(2)]
    while not engine.stats()["preemptions"]:
        engine.wait_for_tokens(1)
    engine.load(other_weights, 31)
    (new,) = engine.sample(prompt, sampling=Sampling(1.0, 8))
    agree(new.logprobs, reference_logprobs(other_weights, prompt, new.token_ids))
    for group in ray.get(references, timeout=60):
        for one in group:
            assert set(one.versions) <= {30, 31} and (np.diff(one.versions) >= 0).all()
    engine.load(moe_model, 32)


def test_weights_are_touched_only_during_a_pause(engine):
    with pytest.raises(SyncError, match="engine-0 is sampling: pause it"):
        engine.apply_model(lambda model: None)
    with pytest.raises(SyncError, match="pause it first"):
        engine.resume(99)
    engine.pause()
    (names,) = engine.apply_model(
        lambda model, suffix: [n for n, _ in model.named_parameters() if n.endswith(suffix)], "norm.weight"
    )
    engine.resume()
    assert "model.norm.weight" in names
    assert engine.health()["version"] == 32


# Faults


def test_a_prompt_without_room_is_refused_and_the_rest_of_its_call_too(engine):
    prompts = [make_prompt("fits"), make_prompt("too-long", 256)]
    with pytest.raises(ConfigError, match=r"'too-long' has 256 tokens.*max_model_len \(256\)"):
        engine.generate(prompts, 2, 0)
    assert engine.stats()["running"] + engine.stats()["waiting"] == 0


def test_abort_all_ends_every_request_with_an_error(engine):
    lost = engine.begin("generate_one", make_prompt("aborted"), 8, 0, LONG)
    engine.wait_for_tokens(8)
    assert 0 < engine.abort_all() <= 8
    with pytest.raises(RLActorsError, match=r"prompt 'aborted' .* was aborted on request"):
        ray.get(lost, timeout=30)
    assert engine.sample(make_prompt("after"))[0].finish_reason in ("stop", "length")
    assert engine.stats()["kv_use"] == 0.0


def test_sleep_is_for_gpus(engine):
    with pytest.raises(RLActorsError, match="sleep works on GPU only"):
        engine.sleep()


def test_a_late_prompt_is_named_and_aborted(engine):
    engine.pause()
    with pytest.raises(ActorLateError, match=r"engine-0 did not finish within 0.3 s .*paused: prompt 'slow' \(2 of 2"):
        engine.generate_one(make_prompt("slow"), 2, 0, None, 0.3)
    assert engine.stats()["waiting"] == 0
    engine.resume()


# Last in this module: the engine does not survive it.
def test_a_failed_step_is_told_to_every_caller_and_ends_the_engine(engine):
    lost = [engine.begin("generate_one", make_prompt(f"lost-{i}"), 2, i, LONG) for i in range(2)]
    engine.wait_for_tokens(4)
    engine.on_engine_thread(break_model)
    for index, reference in enumerate(lost):
        with pytest.raises(ActorDiedError, match=rf"engine-0 failed .*broken on purpose.* lost prompt 'lost-{index}'"):
            ray.get(reference, timeout=30)
    with pytest.raises(ActorDiedError, match=r"engine-0 failed .* must be restarted"):
        engine.sample(make_prompt("next"))
    assert engine.health()["state"] == "failed"


def break_model(llm):
    def fail(*args, **kwargs):
        raise ValueError("broken on purpose")

    llm.model_executor.driver_worker.worker.model_runner.model.forward = fail
