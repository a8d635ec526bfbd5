"""Merged shards: W + (alpha / rank) * B @ A in float32, from the frozen base, cast once.

Invariant: the base is only read. The result lies in a buffer that the next batch overwrites; the largest thing ever
allocated is one batch. Experts of a layer are merged together, as many as fit into the scratch size. What is gathered
over tensor-parallel ranks is A or B, never a weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rl_actors.trainer.lora import AdapterShard


class Merger:
    """Merges this rank's adapted weights by global name, such as `layers.3.mlp.experts.7.linear_fc1`.

    Args:
        adapters: of this rank, in model order.
        dtype: of the merged weights.
        scratch_numel: elements merged at once, where a single weight is not larger.
    """

    def __init__(self, adapters: Sequence[AdapterShard], dtype: torch.dtype, scratch_numel: int) -> None:
        self.shards = {adapter.name: adapter for adapter in adapters}
        self.dtype = dtype
        self._scratch_numel = scratch_numel
        self._factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._scratch: torch.Tensor | None = None
        self._merged: torch.Tensor | None = None

    def gather(self) -> None:
        """Fetch what tensor parallelism keeps elsewhere of A and B. Collective: all ranks, in the same order."""
        self._factors = {name: shard.local_factors() for name, shard in self.shards.items()}

    @property
    def buffer_bytes(self) -> int:
        """Size of the buffers held at present."""
        return sum(buffer.nbytes for buffer in (self._scratch, self._merged) if buffer is not None)

    def release(self) -> None:
        """Give the buffers back."""
        self._factors = {}
        self._scratch = self._merged = None

    @torch.no_grad()
    def merged(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, merged shard [out_local, in_local]) in the order given; a tensor is good until the next is asked for.

        `gather` must have run since the adapters changed.
        """
        with _exact_float32():
            for batch in self._batches(names):
                yield from zip(batch, self._merge(batch), strict=True)

    def _batches(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Runs of experts of one layer and kind, cut to the scratch size; everything else alone."""

        def kind(name: str) -> tuple[object, ...]:
            shard = self.shards[name]
            return (shard.layer, shard.kind, shard.base.shape) if shard.expert is not None else (name,)

        for _, run in itertools.groupby(names, key=kind):
            members = list(run)
            at_once = max(1, self._scratch_numel // self.shards[members[0]].base.numel())
            for start in range(0, len(members), at_once):
                yield members[start : start + at_once]

    def _merge(self, batch: list[str]) -> torch.Tensor:
        """[len(batch), out, in] in the model's type."""
        shards = [self.shards[name] for name in batch]
        factors = [self._factors[name] for name in batch]
        shape = (len(batch), *shards[0].base.shape)
        scratch = self._buffer("_scratch", torch.float32, shape, shards[0].base.device)
        torch._foreach_copy_(list(scratch), [shard.base for shard in shards])
        a_ERI = torch.stack([a.float() for a, _ in factors])
        b_EOR = torch.stack([b.float() for _, b in factors])
        scratch.baddbmm_(b_EOR, a_ERI, alpha=shards[0].scale)
        if self.dtype == torch.float32:
            return scratch
        return self._buffer("_merged", self.dtype, shape, scratch.device).copy_(scratch)

    def _buffer(self, slot: str, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        numel = torch.Size(shape).numel()
        buffer = getattr(self, slot)
        if buffer is None or buffer.numel() < numel:
            buffer = torch.empty(numel, dtype=dtype, device=device)
            setattr(self, slot, buffer)
        return buffer[:numel].view(shape)


@contextmanager
def _exact_float32() -> Iterator[None]:
    """No TF32: it would round A and B to 10 bits before the product."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
