"""The adapters on this rank, each under the name it has in every layout.

Bridge puts adapters in; `find_adapters` finds them again and says what part of which global adapter each one is, as in
`layers.3.self_attention.linear_qkv` or `layers.3.mlp.experts.7.linear_fc1`. In full a global adapter is

    A: [rank, in]   B: [out, rank]   adapted weight = W + scale * B @ A

with the rows of `linear_fc1` in the order gate, up, and those of `linear_qkv` group by group as Megatron keeps them.
An adapter of a part of a weight, such as `layers.3.self_attention.linear_q`, changes the rows of that part only. DoRA
adds M [out, 1], the lengths that the rows of the adapted weight get.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from rl_actors.trainer.slices import Slice
from rl_actors.trainer.wrappers import CanonicalLinear, DoRALinear, FusedRows

PartName = Literal["A", "B", "M"]

ROW_PARALLEL = ("linear_proj", "linear_fc2")
"""Kinds whose base weight is split over its input; all others are split over their output."""


@dataclass(frozen=True)
class AdapterPart:
    """A, B or M of an adapter: what is trained, saved and resumed.

    Attributes:
        local: this rank's shard (a view of the parameter).
        where: the shard's place in the full tensor.
        shape: of the full tensor.
        base: of M, what to add to `local` for the lengths themselves (float32); None otherwise.
    """

    name: PartName
    local: torch.Tensor
    parameter: nn.Parameter
    where: Slice
    base: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        shape = list(self.local.shape)
        shape[self.where.axis] *= self.where.size
        return shape[0], shape[1]


@dataclass(frozen=True)
class AdapterShard:
    """This rank's part of one adapter and of the weight under it.

    Attributes:
        name: global name, the same in every layout.
        kind: adapted layer type: `linear_qkv`, ..., `experts.linear_fc1`.
        layer: global layer number, from 0.
        expert: global expert number, or None outside of experts.
        base: the frozen weight's shard [out_local, in_local]. Never write to it.
        base_name: its parameter name in this rank's model chunk, as Bridge's conversion tasks name it.
        a, b: the adapter's shards as trained (views of the parameters, which may hold several experts).
        a_parameter, b_parameter: the parameters behind them.
        index: where a and b lie in parameters that hold several experts; None if they are the parameters.
        shared: all local experts have this same adapter (`share_expert_adapters`).
        a_slice, b_slice: where they lie in the full A [rank, in] and B [out, rank].
        base_slice: where `base` lies in the full weight [out, in].
        scale: of B @ A.
        group: the tensor-parallel group the slices are numbered in.
        weight: global name of the adapted weight, for one weight may have an adapter for each of its parts.
        rows: (start, stop) runs of the rows of `base` that this adapter changes; None for all.
        magnitude: M, of DoRA; cut as B is.
    """

    name: str
    kind: str
    layer: int
    expert: int | None
    base: torch.Tensor
    base_name: str
    a: torch.Tensor
    b: torch.Tensor
    a_parameter: nn.Parameter
    b_parameter: nn.Parameter
    a_slice: Slice
    b_slice: Slice
    base_slice: Slice
    scale: float
    group: Any = field(repr=False)
    weight: str
    index: int | None = None
    shared: bool = False
    rows: tuple[tuple[int, int], ...] | None = None
    magnitude: AdapterPart | None = None

    def of_parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        """This adapter's part of something shaped like one of its parameters."""
        return tensor if self.index is None else tensor[self.index]

    def parts(self) -> list[AdapterPart]:
        """A, B, and M if there is one."""
        pair = [
            AdapterPart("A", self.a, self.a_parameter, self.a_slice),
            AdapterPart("B", self.b, self.b_parameter, self.b_slice),
        ]
        return pair if self.magnitude is None else [*pair, self.magnitude]

    def full(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(A, B) whole, in the parameters' type. Collective over `group`."""
        return gather(self.a, self.a_slice, self.group), gather(self.b, self.b_slice, self.group)

    def local_factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(A, B) such that `base + scale * B @ A` is this rank's merged shard. Collective over `group`.

        Of a weight split over its output A is gathered; of one split over its input B is.
        """
        if self.base_slice.axis == 0:
            return gather(self.a, self.a_slice, self.group), self.b
        return self.a, gather(self.b, self.b_slice, self.group)

    @torch.no_grad()
    def row_norms(self) -> torch.Tensor:
        """Lengths of the rows of W + scale * B @ A over their whole input, float32 [rows of `base`]. Collective."""
        a, b = self.local_factors()
        squares = torch.addmm(self.base.float(), b.float(), a.float(), alpha=self.scale).square_().sum(dim=1)
        if self.base_slice.axis == 1 and self.base_slice.size > 1:
            dist.all_reduce(squares, group=self.group)
        return squares.sqrt_()

    @torch.no_grad()
    def row_scale(self) -> torch.Tensor | None:
        """What DoRA multiplies the rows of W + scale * B @ A with, float32 [rows of `base`]. Collective over `group`.

        None if the adapter has no M.
        """
        if self.magnitude is None or self.magnitude.base is None:
            return None
        lengths = self.magnitude.base + self.magnitude.local.float()
        if self.base_slice.axis == 1:
            lengths = gather(lengths, self.magnitude.where, self.group)
        return lengths[:, 0] / self.row_norms()


def gather(shard: torch.Tensor, where: Slice, group: Any) -> torch.Tensor:
    """The full tensor from every rank's shard of it. Collective over `group`."""
    if where.size == 1:
        return shard.detach()
    local = shard.detach().contiguous()
    parts = [torch.empty_like(local) for _ in range(where.size)]
    dist.all_gather(parts, local, group=group)
    return where.join(parts)


def find_adapters(chunks: list[nn.Module]) -> list[AdapterShard]:
    """The adapters of this rank's model chunks, in module order. DoRA's modules are told theirs."""
    return [shard for chunk in chunks for shard in _adapters_of(_unwrapped(chunk))]


def _unwrapped(chunk: Any) -> nn.Module:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    unwrapped: nn.Module = chunk
    return unwrapped


def _adapters_of(model: nn.Module) -> Iterator[AdapterShard]:
    layers = {name: module for name, module in model.named_modules() if isinstance(module, TransformerLayer)}
    for path, module in model.named_modules():
        if not isinstance(module, AdapterWrapper):
            continue
        layer_path = next(name for name in layers if path.startswith(name + "."))
        layer = layers[layer_path].layer_number - 1
        weight = f"layers.{layer}.{path[len(layer_path) + 1 :]}"
        if isinstance(module, CanonicalLinear):
            for part, adapter in module.adapter.items():
                yield from _shards(_Site(path, weight, layer, module.to_wrap, adapter, part, module.fused))
            continue
        shards = list(_shards(_Site(path, weight, layer, module.to_wrap, module.adapter)))
        if isinstance(module, DoRALinear):
            shards = [_with_magnitude(shard, module) for shard in shards]
            module.shards = shards
        yield from shards


@dataclass(frozen=True)
class _Site:
    """Where an adapter module stands: module path and name of its weight, the frozen linear, and the part of it."""

    path: str
    weight: str
    layer: int
    linear: Any
    adapter: Any
    part: str | None = None
    fused: FusedRows | None = None


def _shards(site: _Site) -> Iterator[AdapterShard]:
    a, b = site.adapter.linear_in.weight, site.adapter.linear_out.weight
    if ".experts." not in site.weight or ".shared_experts." in site.weight:
        yield _shard(site, site.weight, None, "weight", a, b)
        return
    local_experts = site.linear.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    first = parallel_state.get_expert_model_parallel_rank() * local_experts
    sequential = re.search(r"\.local_experts\.(\d+)\.", site.weight)
    if sequential:
        expert = first + int(sequential[1])
        yield _shard(site, site.weight.replace(sequential[0], f".{expert}."), expert, "weight", a, b)
        return
    for index in range(local_experts):
        weight = site.weight.replace(".experts.", f".experts.{first + index}.")
        # A shared adapter (share_expert_adapters) is one matrix for all local experts.
        place = index if a.dim() == 3 else None
        own_a, own_b = (a, b) if place is None else (a[place], b[place])
        shard = _shard(site, weight, first + index, f"weight{index}", own_a, own_b)
        yield replace(shard, index=place, shared=place is None)


def _shard(
    site: _Site, weight: str, expert: int | None, parameter: str, a: torch.Tensor, b: torch.Tensor
) -> AdapterShard:
    block, _, linear = weight.rpartition(".")
    layer_type = site.part or linear
    if expert is None:
        group = parallel_state.get_tensor_model_parallel_group()
        kind = f"shared_experts.{layer_type}" if ".shared_experts." in weight else layer_type
    else:
        group = parallel_state.get_expert_tensor_parallel_group()
        kind = f"experts.{layer_type}"
    rank, size = group.rank(), group.size()
    gated = linear == "linear_fc1" and site.linear.config.gated_linear_unit
    by_input = linear in ROW_PARALLEL
    return AdapterShard(
        name=f"{block}.{layer_type}",
        kind=kind,
        layer=site.layer,
        expert=expert,
        base=getattr(site.linear, parameter),
        base_name=f"{site.path}.to_wrap.{parameter}",
        a=a,
        b=b,
        a_parameter=site.adapter.linear_in.weight,
        b_parameter=site.adapter.linear_out.weight,
        a_slice=Slice(1 if by_input else 0, rank, size),
        b_slice=Slice(0, rank, size, gated=gated and site.part is None),
        base_slice=Slice(1 if by_input else 0, rank, size, gated=gated),
        scale=site.adapter.alpha / site.adapter.dim,
        group=group,
        weight=weight,
        rows=site.fused.rows(site.part) if site.fused and site.part else None,
    )


def _with_magnitude(shard: AdapterShard, wrapper: DoRALinear) -> AdapterShard:
    parameter = wrapper.adapter.magnitude
    local, base = shard.of_parameter(parameter), shard.of_parameter(wrapper.base_norms)
    return replace(shard, magnitude=AdapterPart("M", local, parameter, shard.b_slice, base))


def write(shard: torch.Tensor, where: Slice, full: torch.Tensor) -> None:
    """Put this rank's part of a full tensor into a shard."""
    shard.detach().copy_(where.of(full))
