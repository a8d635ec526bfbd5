"""Log-probabilities and entropy of sampled tokens from hidden states, without ever holding the logits of all tokens.

The output layer is frozen, and that decides the form. The derivative of log p(target) with respect to a hidden state
is `(W[target] - sum_v p(v) W[v]) / temperature`: one vector for each token, known as soon as its logits are. So the
forward pass goes over the tokens chunk by chunk, keeps that vector and forgets the chunk's logits, and the backward
pass is one multiplication. Both together cost the two products with the vocabulary that they cost with whole logits; a
forward pass without gradient costs one.

With tensor parallelism each rank has the rows of its part of the vocabulary, and four numbers per token cross ranks
(highest logit, sum of exponentials, the target's logit, the entropy's sum). Invariant: equal to
`log_softmax(hidden @ weight.T / temperature)` of the whole vocabulary, and the gradient too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 512 * 2**20
"""Size of a chunk's logits in float32. Up to three times as much is at work at once."""
CHUNK_MULTIPLE = 128
"""Tokens of a chunk are a multiple of this, which suits matrix units."""
IMPOSSIBLE = -1e30
"""The logit of padding: its probability is exactly zero, and zero times it is zero, which is not so with -inf."""


def token_logprobs(
    hidden_RH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_R: torch.Tensor,
    temperature: float,
    vocab_size: int,
    group: Any = None,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of each distribution.

    Args:
        hidden_RH: [R, H], what the output layer takes, for the wanted positions only.
        weight_VH: [V / ranks, H], this rank's rows of the output layer, of the same type; frozen.
        targets_R: int64 [R], global token ids.
        temperature: what logits are divided by; the sampler's, so that ratios start at 1.
        vocab_size: tokens of the model; rows beyond it are padding and count as impossible.
        group: tensor-parallel group that splits the vocabulary, or None. Every rank has the same R.
        chunk: tokens taken at once; by default as many as `CHUNK_BYTES` allows.

    Returns:
        logprobs float32 [R], with gradient; entropy float32 [R] in nats, without. The gradient of `hidden_RH` is this
        rank's part: the sum over the group is whole.

    Raises:
        ValueError: the weight asks for a gradient, which is not computed here.
    """
    if weight_VH.requires_grad:
        raise ValueError("the output layer's weight asks for a gradient: log-probabilities need a frozen output layer")
    rank, size = (group.rank(), group.size()) if group is not None else (0, 1)
    first = rank * weight_VH.shape[0]
    logprobs, entropy = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_RH,
        weight_VH,
        targets_R - first,
        temperature,
        max(0, vocab_size - first),
        group if size > 1 else None,
        chunk or chunk_tokens(weight_VH.shape[0]),
        torch.is_grad_enabled() and hidden_RH.requires_grad,
    )
    return logprobs, entropy


def chunk_tokens(columns: int) -> int:
    """Tokens of one chunk, for this many tokens of the vocabulary on a rank."""
    return max(1, CHUNK_BYTES // (4 * columns * CHUNK_MULTIPLE)) * CHUNK_MULTIPLE


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: torch.Tensor,
        weight_VH: torch.Tensor,
        targets_R: torch.Tensor,
        temperature: float,
        real: int,
        group: Any,
        chunk: int,
        with_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`targets_R` count from this rank's first row; its first `real` rows are tokens, the others padding."""
        logprobs, entropy = torch.empty(2, len(hidden_RH), dtype=torch.float32, device=hidden_RH.device)
        derivative_RH = torch.empty_like(hidden_RH) if with_gradient else None
        for start in range(0, len(hidden_RH), chunk):
            rows = slice(start, start + chunk)
            logprobs[rows], entropy[rows] = _chunk_logprobs(
                hidden_RH[rows],
                weight_VH,
                targets_R[rows],
                temperature,
                real,
                group,
                None if derivative_RH is None else derivative_RH[rows],
            )
        if derivative_RH is not None:
            ctx.save_for_backward(derivative_RH)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_R: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        (derivative_RH,) = ctx.saved_tensors
        return (derivative_RH * grad_R[:, None]).to(derivative_RH.dtype), *[None] * 7


def _chunk_logprobs(
    hidden_CH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_C: torch.Tensor,
    temperature: float,
    real: int,
    group: Any,
    derivative_CH: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropy of some tokens; writes d logprob / d hidden to `derivative_CH` if it is given.

    Every pass over [C, V] costs as much as a good part of the matrix products, so they are few and in place.
    """
    logits = hidden_CH @ weight_VH.t()  # in the model's type, as the sampler has them
    if real < logits.shape[1]:
        logits[:, real:] = IMPOSSIBLE
    highest = logits.amax(dim=-1).float()
    _reduce(highest, dist.ReduceOp.MAX, group)
    shifted = logits.sub_(highest[:, None]) if logits.dtype == torch.float32 else logits - highest[:, None]
    if temperature != 1.0:
        shifted.div_(temperature)

    mine = (targets_C >= 0) & (targets_C < logits.shape[1])
    local = targets_C.clamp(0, logits.shape[1] - 1)[:, None]
    target = torch.where(mine, shifted.gather(1, local)[:, 0], 0.0)
    exponentials = shifted.exp()
    sums = torch.stack([exponentials.sum(dim=-1), target, shifted.mul_(exponentials).sum(dim=-1)])
    _reduce(sums, dist.ReduceOp.SUM, group)
    total, target, weighted = sums

    if derivative_CH is not None:
        # d log p(target) / d logit_v = (1[v is target] - p(v)) / temperature, taken back through the output layer.
        gradient = exponentials.mul_((-1.0 / (temperature * total))[:, None])
        gradient.scatter_add_(1, local, (mine / temperature)[:, None])
        torch.mm(gradient if gradient.dtype == logits.dtype else logits.copy_(gradient), weight_VH, out=derivative_CH)
    return target - total.log(), total.log() - weighted / total


def _reduce(tensor: torch.Tensor, operation: Any, group: Any) -> None:
    if group is not None:
        dist.all_reduce(tensor, op=operation, group=group)
