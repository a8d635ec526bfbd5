"""Groups become a batch: tokens untouched, advantages per token, uniform groups left out and counted."""

from __future__ import annotations

import numpy as np
import pytest

from rl_actors.algorithms.batching import make_train_batch, split_batch
from rl_actors.config import AlgorithmConfig
from rl_actors.types import Prompt, Trajectory, TrajectoryGroup


def _group(name: str, prompt: list[int], answers: list[list[int]], rewards: list[float]) -> TrajectoryGroup:
    trajectories = tuple(
        Trajectory(
            prompt_id=name,
            token_ids=np.array(tokens, dtype=np.int32),
            logprobs=np.array([-0.01 * token for token in tokens], dtype=np.float32),
            versions=np.zeros(len(tokens), dtype=np.int32),
            finish_reason="length" if len(tokens) > 2 else "stop",
            text="",
        )
        for tokens in answers
    )
    prompt_row = Prompt(id=name, token_ids=np.array(prompt, dtype=np.int32), text=name)
    return TrajectoryGroup(prompt_row, trajectories, np.array(rewards, dtype=np.float32))


MIXED = _group("a", [1, 2, 3], [[10, 11], [12]], [1.0, 0.0])
UNIFORM = _group("b", [4], [[13, 14, 15], [16, 17]], [0.5, 0.5])


def test_a_batch_is_the_groups_laid_end_to_end():
    batch, stats = make_train_batch([MIXED, UNIFORM], AlgorithmConfig(advantage="dr_grpo", drop_uniform_groups=False))
    assert batch.tokens.tolist() == [1, 2, 3, 10, 11, 1, 2, 3, 12, 4, 13, 14, 15, 4, 16, 17]
    assert batch.prompt_lengths.tolist() == [3, 3, 1, 1]
    assert batch.response_lengths.tolist() == [2, 1, 3, 2]
    assert batch.sampler_logprobs.tolist() == pytest.approx([-0.1, -0.11, -0.12, -0.13, -0.14, -0.15, -0.16, -0.17])
    assert batch.advantages.tolist() == [0.5, 0.5, -0.5, 0, 0, 0, 0, 0]
    assert batch.old_logprobs is None and batch.ref_logprobs is None
    assert (batch.tokens.dtype, batch.advantages.dtype, batch.loss_weights.dtype) == (np.int32, np.float32, np.float32)
    assert (stats.uniform_groups, stats.dropped_groups, stats.sequences, stats.response_tokens) == (1, 0, 4, 8)


def test_uniform_groups_are_left_out_and_the_weights_are_over_the_rest():
    batch, stats = make_train_batch([UNIFORM, MIXED, UNIFORM], AlgorithmConfig())
    assert batch.response_lengths.tolist() == [2, 1]
    assert batch.loss_weights.tolist() == pytest.approx([1 / 3] * 3)
    assert (stats.groups, stats.uniform_groups, stats.dropped_groups, stats.sequences) == (3, 2, 2, 2)
    assert stats.reward_mean == pytest.approx(0.5)
    assert stats.reward_std == pytest.approx(np.std([1, 0, 0.5, 0.5, 0.5, 0.5]))
    assert stats.response_length_mean == pytest.approx(13 / 6)
    assert stats.truncated_fraction == pytest.approx(2 / 6)


def test_only_uniform_groups_make_no_batch_but_statistics():
    batch, stats = make_train_batch([UNIFORM, UNIFORM], AlgorithmConfig())
    assert batch is None
    assert (stats.dropped_groups, stats.sequences, stats.response_tokens, stats.reward_mean) == (2, 0, 0, 0.5)


def test_mini_batches_hold_every_sequence_once_and_weigh_their_own_tokens():
    config = AlgorithmConfig(drop_uniform_groups=False, loss_reduction="sequence_mean")
    batch, _ = make_train_batch([MIXED, UNIFORM], config)
    parts = split_batch(batch, 3, config)
    assert [part.response_lengths.tolist() for part in parts] == [[2, 2], [1], [3]]
    assert sorted(token for part in parts for token in part.tokens) == sorted(batch.tokens)
    assert [float(part.loss_weights.sum()) for part in parts] == pytest.approx([1.0, 1.0, 1.0])
    assert split_batch(batch, 1, config) == [batch]
    assert len(split_batch(batch, 9, config)) == 4


def test_faults_are_refused():
    with pytest.raises(ValueError, match="at least one group"):
        make_train_batch([], AlgorithmConfig())
    with pytest.raises(ValueError, match=r"prompt c: rewards of shape \(1,\) for 2 answers"):
        make_train_batch([_group("c", [1], [[2], [3]], [1.0])], AlgorithmConfig())
    with pytest.raises(ValueError, match="prompt d: an answer of 0 tokens"):
        make_train_batch([_group("d", [1], [[2], []], [1.0, 0.0])], AlgorithmConfig())
