"""output_t += low_t @ factors[e] for every token t and its expert e, in one pass over the output.

A grouped GEMM would write the product and a second kernel add it: with a rank of 32 both are bound by memory, and this
reads and writes the output once. On CPU, and where Triton is absent, it is that GEMM and that addition.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn import functional

ROWS, COLUMNS = 64, 128
"""Output elements of one program."""
SMALLEST_DOT = 16
"""Triton's matrix products have no side below this."""


def add_low_rank(output: torch.Tensor, low: torch.Tensor, factors: torch.Tensor, ends: torch.Tensor) -> None:
    """Add in place.

    Args:
        output: [tokens, n], contiguous; tokens sorted by expert.
        low: [tokens, rank], contiguous.
        factors: [experts, rank, n], any strides.
        ends: int32 [experts], where the tokens of each expert end.
    """
    if not len(output):
        return
    if output.is_cuda and output.dtype == torch.bfloat16:
        launch(output, low, factors, ends)
    else:
        output += functional.grouped_mm(low, factors, offs=ends)


def launch(output: torch.Tensor, low: torch.Tensor, factors: torch.Tensor, ends: torch.Tensor) -> None:
    """Run the kernel."""
    tokens, width = output.shape
    rank, experts = low.shape[1], len(ends)
    # Every expert may have one block that is not full.
    blocks = tokens // ROWS + experts
    _kernel()[(blocks, -(-width // COLUMNS))](
        output,
        low,
        factors,
        ends,
        experts,
        width,
        rank,
        *factors.stride(),
        EXPERTS=_power_of_two(experts),
        RANK=max(SMALLEST_DOT, _power_of_two(rank)),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
    )


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


@cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def low_rank_add(  # type: ignore[no-untyped-def]
        output,
        low,
        factors,
        ends,
        experts,
        width,
        rank,
        expert_stride,
        rank_stride,
        column_stride,
        EXPERTS: tl.constexpr,
        RANK: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        # Which expert this block of rows belongs to, and which of its blocks it is.
        block = tl.program_id(0)
        every = tl.arange(0, EXPERTS)
        here = every < experts
        stops = tl.load(ends + every, mask=here, other=0)
        starts = tl.load(ends + every - 1, mask=here & (every > 0), other=0)
        counts = tl.where(here, (stops - starts + ROWS - 1) // ROWS, 0)
        expert = tl.sum((tl.cumsum(counts, 0) <= block).to(tl.int32), 0)
        if expert < experts:
            earlier = tl.sum(tl.where(every < expert, counts, 0), 0)
            start = tl.sum(tl.where(every == expert, starts, 0), 0)
            stop = tl.sum(tl.where(every == expert, stops, 0), 0)
            rows = (start + (block - earlier) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
            columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
            ranks = tl.arange(0, RANK)
            left = tl.load(
                low + rows[:, None] * rank + ranks[None, :],
                mask=(rows[:, None] < stop) & (ranks[None, :] < rank),
                other=0.0,
            )
            right = tl.load(
                factors
                + expert.to(tl.int64) * expert_stride
                + ranks[:, None] * rank_stride
                + columns[None, :] * column_stride,
                mask=(ranks[:, None] < rank) & (columns[None, :] < width),
                other=0.0,
            )
            place = output + rows[:, None] * width + columns[None, :]
            inside = (rows[:, None] < stop) & (columns[None, :] < width)
            value = tl.load(place, mask=inside, other=0.0).to(tl.float32) + tl.dot(left, right)
            tl.store(place, value.to(output.dtype.element_ty), mask=inside)

    return low_rank_add
