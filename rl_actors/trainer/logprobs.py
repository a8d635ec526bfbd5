"""Log-probabilities and entropy of sampled tokens from logits that are split over the vocabulary.

With tensor parallelism each rank holds the logits of its part of the vocabulary. Only three numbers per token cross
ranks (maximum, sum of exponentials, the target's logit), never the logits; the gradient is written out, so the backward
pass needs no communication at all. Invariant: equal to `log_softmax(logits / temperature)` of the whole vocabulary.

`token_logprobs` takes the logits of the wanted positions only. A caller that has hidden states can feed it chunk by
chunk: nothing here looks beyond one row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def token_logprobs(
    logits_RV: torch.Tensor, targets_R: torch.Tensor, temperature: float, vocab_size: int, group: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of each distribution.

    Args:
        logits_RV: [R, V / ranks], this rank's part of the vocabulary, any floating type.
        targets_R: int64 [R], global token ids.
        temperature: what logits are divided by; the sampler's, so that ratios start at 1.
        vocab_size: tokens of the model; columns beyond it are padding and count as impossible.
        group: tensor-parallel group that splits the vocabulary, or None.

    Returns:
        logprobs float32 [R], with gradient; entropy float32 [R] in nats, without gradient.
    """
    rank, size = (group.rank(), group.size()) if group is not None else (0, 1)
    first = rank * logits_RV.shape[1]
    logprobs, entropy = _VocabParallelLogprobs.apply(  # type: ignore[no-untyped-call]
        logits_RV, targets_R, temperature, first, max(0, vocab_size - first), group if size > 1 else None
    )
    return logprobs, entropy


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_RV: torch.Tensor,
        targets_R: torch.Tensor,
        temperature: float,
        first: int,
        columns: int,
        group: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`columns` is how many of this rank's columns are real tokens (more than it holds: all)."""
        scaled = logits_RV.float() / temperature
        if columns < scaled.shape[1]:
            scaled[:, columns:] = -torch.inf
        highest = scaled.amax(dim=-1)
        _reduce(highest, dist.ReduceOp.MAX, group)
        scaled = scaled - highest[:, None]
        exponentials = scaled.exp()

        local = targets_R - first
        mine = (local >= 0) & (local < scaled.shape[1])
        local = local.clamp(0, scaled.shape[1] - 1)
        target = torch.where(mine, scaled.gather(1, local[:, None])[:, 0], 0.0)
        weighted = torch.where(exponentials > 0, exponentials * scaled, 0.0).sum(dim=-1)
        sums = torch.stack([exponentials.sum(dim=-1), target, weighted])
        _reduce(sums, dist.ReduceOp.SUM, group)
        total, target, weighted = sums

        probabilities = exponentials / total[:, None]
        ctx.save_for_backward(probabilities, local, mine)
        ctx.temperature, ctx.dtype = temperature, logits_RV.dtype
        entropy = total.log() - weighted / total
        ctx.mark_non_differentiable(entropy)
        return target - total.log(), entropy

    @staticmethod
    def backward(ctx: Any, grad_R: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        """d log p(target) / d logit_v = (1[v is target] - p(v)) / temperature."""
        probabilities, local, mine = ctx.saved_tensors
        grad_RV = probabilities.mul(-grad_R[:, None])
        grad_RV.scatter_add_(1, local[:, None], (grad_R * mine)[:, None])
        return (grad_RV / ctx.temperature).to(ctx.dtype), None, None, None, None, None


def _reduce(tensor: torch.Tensor, operation: Any, group: Any) -> None:
    if group is not None:
        dist.all_reduce(tensor, op=operation, group=group)
