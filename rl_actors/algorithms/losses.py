"""The clipped policy-gradient loss of one micro-batch, and the weights that make it a plain sum.

Invariant: the loss of a batch is the sum of the losses of its parts, however it is cut into micro-batches and ranks.
So are its metrics, except those named "max/...", which combine with max. The whole normalisation is in
`loss_weights`, computed once for the batch.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from rl_actors.algorithms.corrections import truncated_weights
from rl_actors.config import AlgorithmConfig

# Beyond this a ratio says only "far away"; exp() of more overflows in float32 for differences of 89.
LOG_RATIO_LIMIT = 20.0


def policy_loss(
    logprobs_R: torch.Tensor,
    old_logprobs_R: torch.Tensor,
    sampler_logprobs_R: torch.Tensor,
    advantages_R: torch.Tensor,
    loss_weights_R: torch.Tensor,
    ref_logprobs_R: torch.Tensor | None,
    config: AlgorithmConfig,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped objective with truncated importance sampling and an optional KL term.

    For each token, with r = exp(logprobs - old_logprobs), advantage A and w = min(exp(old - sampler), tis_cap):

        token loss = -w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) + kl_coef * k3
        k3 = exp(ref - logprobs) - (ref - logprobs) - 1

    Sources: PPO, arXiv:1707.06347; clip-higher of DAPO, arXiv:2503.14476; k3, "Approximating KL Divergence"
    (Schulman, 2020). All inputs are float32 [R] on one device, at the sampling temperature; only `logprobs_R` carries
    a gradient. R may be 0 (a rank without tokens): the loss is then 0 and still attached to the graph.

    Returns:
        (loss, metrics): a scalar, sum over tokens of loss_weights * token loss; and detached scalars, weighted with
        the loss weights too, so that adding them over a batch gives its mean:
        policy_loss, ratio, clip_fraction (tokens whose gradient the clip removed), kl_old (k3 of the step),
        tis_weight, tis_capped_fraction, logprob_gap (|old - sampler|), "max/logprob_gap"; kl_ref with a reference.
    """
    log_ratio = _limited(logprobs_R - old_logprobs_R)
    ratio = log_ratio.exp()
    unclipped = ratio * advantages_R
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * advantages_R
    tis_weights, tis_capped = truncated_weights(old_logprobs_R, sampler_logprobs_R, config.tis_cap)
    token_loss_R = -tis_weights * torch.minimum(unclipped, clipped)
    gap = (old_logprobs_R - sampler_logprobs_R).abs()

    tokens: dict[str, torch.Tensor] = {
        "policy_loss": token_loss_R,
        "ratio": ratio,
        "clip_fraction": clipped < unclipped,
        "kl_old": _k3(log_ratio),
        "tis_weight": tis_weights,
        "tis_capped_fraction": tis_capped,
        "logprob_gap": gap,
    }
    if ref_logprobs_R is not None:
        tokens["kl_ref"] = _k3(_limited(ref_logprobs_R - logprobs_R))
        token_loss_R = token_loss_R + config.kl_coef * tokens["kl_ref"]
    elif config.kl_coef > 0:
        raise ValueError(f"algorithm.kl_coef = {config.kl_coef} needs the reference's logprobs")

    with torch.no_grad():
        metrics = {name: (loss_weights_R * value).sum() for name, value in tokens.items()}
        metrics["max/logprob_gap"] = gap.max() if gap.numel() else gap.new_zeros(())
    return (loss_weights_R * token_loss_R).sum(), metrics


def loss_weights(response_lengths_N: np.ndarray, reduction: Literal["token_mean", "sequence_mean"]) -> np.ndarray:
    """What each response token's loss is multiplied with; the weights of a batch add up to 1.

    Args:
        response_lengths_N: int [N], each at least 1.
        reduction: token_mean weighs all R tokens alike (1 / R, DAPO); sequence_mean weighs all sequences alike
            (1 / (N * length), GRPO).

    Returns:
        float32 [R].
    """
    lengths = np.asarray(response_lengths_N, dtype=np.int64)
    if reduction == "token_mean":
        total = int(lengths.sum())
        return np.full(total, 1.0 / max(total, 1), dtype=np.float32)
    if reduction == "sequence_mean":
        return np.repeat(1.0 / (len(lengths) * lengths), lengths).astype(np.float32)
    raise ValueError(f"unknown loss reduction {reduction!r}: use token_mean or sequence_mean")


def _limited(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(x) - x - 1: never negative, and its mean under the policy q of x = log(p / q) is KL(q || p)."""
    return torch.expm1(log_ratio) - log_ratio
