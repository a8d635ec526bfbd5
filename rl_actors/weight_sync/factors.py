"""A and scale * B of a trainer rank's adapters, as the engines' own LoRA takes them.

    merged weight = W + scale * B @ A        adapter: x -> W x + (scale * B) (A x), scale = alpha / rank

Invariant: the shards are sent as they were trained; scale is multiplied into B in float32 and the result is cast once.
No rank gathers a factor. Experts whose factors are one parameter (grouped GEMM) are cast together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rl_actors.trainer.lora import AdapterShard
    from rl_actors.trainer.slices import Slice


@dataclass(frozen=True)
class Factor:
    """A or B of one adapter on this rank.

    Attributes:
        part: "A" or "B".
        param: what it is called in a sync plan: the adapter's name and the part; experts of one parameter share it.
        shard: this adapter's values [rows, columns].
        parameter: what is sent: `shard`, or all experts' [expert, rows, columns].
        index: this adapter's place in `parameter`; None if it is `shard`.
        where: where `shard` lies in the full factor.
        scale: to multiply with.
    """

    part: str
    param: str
    shard: torch.Tensor
    parameter: torch.Tensor
    index: int | None
    where: Slice
    scale: float


def factors_of(adapter: AdapterShard) -> tuple[Factor, Factor]:
    """(A, B)."""
    name = adapter.name
    if adapter.index is not None:
        name = name.replace(f".experts.{adapter.expert}.", ".experts.")
    return (
        Factor("A", f"{name}.A", adapter.a, _whole(adapter, "a"), adapter.index, adapter.a_slice, 1.0),
        Factor("B", f"{name}.B", adapter.b, _whole(adapter, "b"), adapter.index, adapter.b_slice, adapter.scale),
    )


def _whole(adapter: AdapterShard, part: str) -> torch.Tensor:
    if adapter.index is None:
        return adapter.a if part == "a" else adapter.b
    return (adapter.a_parameter if part == "a" else adapter.b_parameter).detach()


class FactorSource:
    """What a `WeightSender` sends in adapter mode; used like the `Merger` of merged mode.

    Args:
        adapters: of this rank.
        dtype: of the model, and so of the engines' LoRA.
    """

    buffer_bytes = 0

    def __init__(self, adapters: Sequence[AdapterShard], dtype: torch.dtype) -> None:
        self.shards = {factor.param: factor for adapter in adapters for factor in factors_of(adapter)}
        self._dtype = dtype

    def gather(self) -> None:
        """Nothing is needed from other ranks."""

    def release(self) -> None:
        """Nothing is held."""

    @torch.no_grad()
    def merged(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, factor in the model's type), in the order given."""
        for name in names:
            factor = self.shards[name]
            yield name, factor.parameter.detach().float().mul(factor.scale).to(self._dtype)

    def merged_together(self, names: Sequence[str]) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """The same, one by one: experts are together already."""
        return ([pair] for pair in self.merged(names))
