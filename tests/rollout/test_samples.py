"""Seeds of samples, and what a sample keeps of each engine step."""

from __future__ import annotations

import numpy as np

from rl_actors.config import RolloutConfig
from rl_actors.rollout.samples import Sample, Sampling, sample_seed
from tests.rollout.tiny_rollout import make_prompt


def test_seeds_differ_by_seed_prompt_and_index_and_never_change():
    seeds = {sample_seed(seed, prompt, index) for seed in (0, 1) for prompt in ("1", "11") for index in (0, 1, 11)}
    assert len(seeds) == 12
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(3, "gsm8k/17", 2) == 4182514459819125537


def test_a_sample_tags_each_token_with_the_version_of_its_step():
    sample = Sample("request", make_prompt("p"))
    sample.append([5], [-0.5], version=3)
    sample.append([6, 7], [-1.5, -0.25], version=4)
    sample.finish_reason = "stop"
    trajectory = sample.trajectory("ab")
    assert trajectory.prompt_id == "p" and trajectory.finish_reason == "stop" and trajectory.text == "ab"
    np.testing.assert_array_equal(trajectory.token_ids, np.array([5, 6, 7], np.int32))
    np.testing.assert_array_equal(trajectory.versions, np.array([3, 4, 4], np.int32))
    np.testing.assert_array_equal(trajectory.logprobs, np.array([-0.5, -1.5, -0.25], np.float32))
    assert trajectory.oldest_version == 3
    assert (trajectory.token_ids.dtype, trajectory.versions.dtype) == (np.int32, np.int32)


def test_evaluation_differs_from_training_in_its_temperature_only():
    training = Sampling.for_training(RolloutConfig(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=33, stop=("x",)))
    assert training == Sampling(0.7, 33, 0.9, 5, ("x",))
    assert training.with_temperature(0.0) == Sampling(0.0, 33, 0.9, 5, ("x",))
