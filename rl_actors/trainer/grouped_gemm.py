"""The arithmetic of experts with one LoRA adapter each, all experts at once, forward and backward.

Tokens arrive sorted by expert, so the frozen weights, A and B are one grouped GEMM each over what is there: nothing is
split, padded or copied by expert. The scale goes onto the [tokens, rank] product, the smallest tensor, and the product
with B (backward: with A) is added into the large output in one pass (`low_rank_add`).

Shapes: x [tokens, in], W [experts, out, in], A [experts, rank, in], B [experts, out, rank]; `ends` int32 [experts] says
where the tokens of each expert end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from rl_actors.trainer.low_rank_add import add_low_rank


def grouped_lora(
    x: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, scale: float
) -> torch.Tensor:
    """(W_e + scale * B_e A_e) x of every token, with the expert e it was sent to: [tokens, out].

    Gradients go to x, A and B; W is frozen.
    """
    output: torch.Tensor = _GroupedLoRA.apply(x, weight, a, b, ends, scale)  # type: ignore[no-untyped-call]
    return output


class _GroupedLoRA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        ends: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        low = by_expert(x, a.transpose(1, 2), ends).mul_(scale)
        output = by_expert(x, weight.transpose(1, 2), ends)
        add_low_rank(output, low, b.transpose(1, 2), ends)
        ctx.save_for_backward(x, low, weight, a, b, ends)
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, low, weight, a, b, ends = ctx.saved_tensors
        grad = grad.contiguous()
        grad_low = by_expert(grad, b, ends).mul_(ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = by_expert(grad, weight, ends)
            add_low_rank(grad_x, grad_low, a, ends)
        return grad_x, None, outer_by_expert(grad_low, x, ends), outer_by_expert(grad, low, ends), None, None


def by_expert(x: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x_t @ matrices[e] of each token t and its expert e: [tokens, k] x [experts, k, n] -> [tokens, n]."""
    if not x.shape[0]:
        return x @ matrices[0]
    return functional.grouped_mm(x, matrices, offs=ends)


def outer_by_expert(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The sum of left_t right_t^T over the tokens of each expert: [tokens, m] x [tokens, n] -> [experts, m, n]."""
    if not left.shape[0]:
        return left.new_zeros(len(ends), left.shape[1], right.shape[1])
    return functional.grouped_mm(left.t(), right, offs=ends)
