"""From the rewards of one prompt's answers to their advantages.

Invariant: a group whose rewards are all equal has advantage exactly zero, whatever the rounding of its mean.
"""

from __future__ import annotations

from typing import Literal

import torch

AdvantageKind = Literal["grpo", "rloo", "dr_grpo"]

STD_EPSILON = 1e-6


def group_advantages(rewards_G: torch.Tensor, kind: AdvantageKind) -> torch.Tensor:
    """How much better each answer is than its group.

    Kinds, for rewards x of G answers:
        grpo: (x - mean) / (std + 1e-6), the sample standard deviation (divisor G - 1). DeepSeekMath,
            arXiv:2402.03300, section 4.1.
        dr_grpo: x - mean. Dr. GRPO, arXiv:2503.20783: dividing by std favours very easy and very hard prompts.
        rloo: x - mean of the other answers. RLOO, arXiv:2402.14740.

    Args:
        rewards_G: float [G], G at least 2.

    Returns:
        float32 [G].

    Raises:
        ValueError: fewer than 2 rewards, or an unknown kind.
    """
    count = rewards_G.numel()
    if rewards_G.dim() != 1 or count < 2:
        raise ValueError(
            f"advantages compare the answers of one prompt: expected [G] with G >= 2, got {rewards_G.shape}"
        )
    rewards = rewards_G.double()
    if is_uniform(rewards):
        return torch.zeros(count, dtype=torch.float32, device=rewards_G.device)
    centred = rewards - rewards.mean()
    if kind == "grpo":
        centred = centred / (rewards.std() + STD_EPSILON)
    elif kind == "rloo":
        # x - (sum - x) / (G - 1) = (x - mean) * G / (G - 1)
        centred = centred * count / (count - 1)
    elif kind != "dr_grpo":
        raise ValueError(f"unknown advantage {kind!r}: use grpo, rloo or dr_grpo")
    return centred.float()


def is_uniform(rewards_G: torch.Tensor) -> bool:
    """All answers of a group have the same reward, so there is nothing to learn from comparing them."""
    return bool((rewards_G == rewards_G[0]).all())
