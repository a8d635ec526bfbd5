"""Advantages against plain Python arithmetic."""

from __future__ import annotations

import statistics

import pytest
import torch

from rl_actors.algorithms.advantages import group_advantages

REWARDS = [[1.0, 0.0, 0.0, 1.0, 0.0], [0.25, -3.0], [0.1, 0.2, 0.7, 100.0]]


def _oracle(rewards: list[float], kind: str) -> list[float]:
    mean = statistics.fmean(rewards)
    if kind == "grpo":
        return [(x - mean) / (statistics.stdev(rewards) + 1e-6) for x in rewards]
    if kind == "dr_grpo":
        return [x - mean for x in rewards]
    return [x - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i, x in enumerate(rewards)]


@pytest.mark.parametrize("kind", ["grpo", "rloo", "dr_grpo"])
@pytest.mark.parametrize("rewards", REWARDS)
def test_advantages_follow_their_definitions(kind, rewards):
    advantages = group_advantages(torch.tensor(rewards), kind)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == pytest.approx(_oracle(rewards, kind), rel=1e-5, abs=1e-6)
    assert float(advantages.sum()) == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "dr_grpo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", range(2, 40))
def test_a_uniform_group_is_exactly_zero(kind, dtype, count):
    """The rounded mean of many times 1/3 is not always 1/3, and a spread of 1e-17 is no reason to learn."""
    assert group_advantages(torch.full((count,), 1 / 3, dtype=dtype), kind).eq(0).all()


def test_faults_are_refused():
    with pytest.raises(ValueError, match="G >= 2"):
        group_advantages(torch.ones(1), "grpo")
    with pytest.raises(ValueError, match="unknown advantage"):
        group_advantages(torch.tensor([0.0, 1.0]), "gae")
