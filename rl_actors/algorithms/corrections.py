"""Truncated importance sampling between the engine that sampled and the trainer that learns.

The engine's kernels, precision and (in an asynchronous run) weight version differ from the trainer's, so its samples
come from a slightly other policy. Each token's loss is multiplied with min(trainer / sampler probability, cap).
Source: "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (Yao et al., 2025), token level.

Invariant: the weights carry no gradient, and are exactly 1 where the two agree.
"""

from __future__ import annotations

import torch


def truncated_weights(
    old_logprobs_R: torch.Tensor, sampler_logprobs_R: torch.Tensor, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Importance weights of sampled tokens.

    Args:
        old_logprobs_R: float32 [R], by the trainer before the step's first update, at the sampling temperature.
        sampler_logprobs_R: float32 [R], by the engine as it sampled.
        cap: greatest weight; 0 turns the correction off (all weights 1).

    Returns:
        (weights float32 [R], capped bool [R]: where the cap cut the ratio).
    """
    ratio = (old_logprobs_R - sampler_logprobs_R).detach().float().exp()
    if cap == 0:
        return torch.ones_like(ratio), torch.zeros_like(ratio, dtype=torch.bool)
    return ratio.clamp(max=cap), ratio > cap
