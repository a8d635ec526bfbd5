"""Merged shards: W + scale * B @ A in float32, from the frozen base, cast once; with DoRA its rows scaled to length.

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
        # By weight: one adapter, or one for each of its parts.
        self.shards: dict[str, list[AdapterShard]] = {}
        for adapter in adapters:
            self.shards.setdefault(adapter.weight, []).append(adapter)
        self.dtype = dtype
        self._scratch_numel = scratch_numel
        self._factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._row_scales: dict[str, torch.Tensor] = {}
        self._scratch: torch.Tensor | None = None
        self._merged: torch.Tensor | None = None

    def gather(self) -> None:
        """Fetch what tensor parallelism keeps elsewhere of A, B and M. Collective: all ranks, in the same order."""
        with _exact_float32():
            for shard in itertools.chain.from_iterable(self.shards.values()):
                self._factors[shard.name] = shard.local_factors()
                if (row_scale := shard.row_scale()) is not None:
                    self._row_scales[shard.name] = row_scale

    @property
    def buffer_bytes(self) -> int:
        """Size of the buffers held at present."""
        return sum(buffer.nbytes for buffer in (self._scratch, self._merged) if buffer is not None)

    def release(self) -> None:
        """Give the buffers back."""
        self._factors, self._row_scales = {}, {}
        self._scratch = self._merged = None

    def merged(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, merged shard [out_local, in_local]) in the order given; a tensor is good until the next is asked for.

        `gather` must have run since the adapters changed.
        """
        return itertools.chain.from_iterable(self.merged_together(names))

    @torch.no_grad()
    def merged_together(self, names: Sequence[str]) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """The same in lists of what is merged at once; a list's tensors are good until the next list is asked for."""
        with _exact_float32():
            for batch in self._batches(names):
                yield list(zip(batch, self._merge(batch), strict=True))

    def _batches(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Runs of experts of one layer and kind, cut to the scratch size; everything else alone."""

        def kind(name: str) -> tuple[object, ...]:
            shards = self.shards[name]
            if shards[0].expert is None:
                return (name,)
            return (shards[0].layer, shards[0].base.shape, *(shard.kind for shard in shards))

        for _, run in itertools.groupby(names, key=kind):
            members = list(run)
            at_once = max(1, self._scratch_numel // self.shards[members[0]][0].base.numel())
            for start in range(0, len(members), at_once):
                yield members[start : start + at_once]

    def _merge(self, batch: list[str]) -> torch.Tensor:
        """[len(batch), out, in] in the model's type."""
        bases = [self.shards[name][0].base for name in batch]
        shape = (len(batch), *bases[0].shape)
        scratch = self._buffer("_scratch", torch.float32, shape, bases[0].device)
        torch._foreach_copy_(list(scratch), bases)
        for alike in zip(*(self.shards[name] for name in batch), strict=True):
            self._add(scratch, alike)
        if self.dtype == torch.float32:
            return scratch
        return self._buffer("_merged", self.dtype, shape, scratch.device).copy_(scratch)

    def _add(self, weights_EOI: torch.Tensor, shards: Sequence[AdapterShard]) -> None:
        """Add to each weight the adapter that it has of one kind."""
        factors = [self._factors[shard.name] for shard in shards]
        a_ERI = torch.stack([a for a, _ in factors]).float()
        b_EOR = torch.stack([b for _, b in factors]).float()
        done = 0
        for start, stop in shards[0].rows or ((0, weights_EOI.shape[1]),):
            height = stop - start
            weights_EOI[:, start:stop].baddbmm_(b_EOR[:, done : done + height], a_ERI, alpha=shards[0].scale)
            done += height
        if shards[0].name in self._row_scales:
            weights_EOI.mul_(torch.stack([self._row_scales[shard.name] for shard in shards])[..., None])

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
