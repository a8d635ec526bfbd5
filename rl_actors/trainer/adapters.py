"""The adapters on this rank, each under the name it has in every layout.

Bridge puts adapters in; `find_adapters` finds them again and says what part of which global adapter each one is, as in
`layers.3.self_attention.linear_qkv` or `layers.3.mlp.experts.7.linear_fc1`. In full a global adapter is

    A: [rank, in]   B: [out, rank]   adapted weight = W + (alpha / rank) * B @ A

with the rows of `linear_fc1` in the order gate, up, and those of `linear_qkv` group by group as Megatron keeps them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from rl_actors.trainer.slices import Slice

ROW_PARALLEL = ("linear_proj", "linear_fc2")
"""Kinds whose base weight is split over its input; all others are split over their output."""


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
        scale: alpha / rank.
        group: the tensor-parallel group the slices are numbered in.
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
    index: int | None = None
    shared: bool = False

    def of_parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        """This adapter's part of something shaped like `a_parameter` or `b_parameter`."""
        return tensor if self.index is None else tensor[self.index]

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


def gather(shard: torch.Tensor, where: Slice, group: Any) -> torch.Tensor:
    """The full tensor from every rank's shard of it. Collective over `group`."""
    if where.size == 1:
        return shard.detach()
    local = shard.detach().contiguous()
    parts = [torch.empty_like(local) for _ in range(where.size)]
    dist.all_gather(parts, local, group=group)
    return where.join(parts)


def find_adapters(chunks: list[nn.Module]) -> list[AdapterShard]:
    """The adapters of this rank's model chunks, in module order."""
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
        yield from _shards(path, f"layers.{layer}.{path[len(layer_path) + 1 :]}", layer, module)


def _shards(path: str, name: str, layer: int, wrapper: AdapterWrapper) -> Iterator[AdapterShard]:
    adapter = wrapper.adapter
    a, b = adapter.linear_in.weight, adapter.linear_out.weight
    if ".experts." not in name or ".shared_experts." in name:
        yield _shard(name, layer, None, wrapper, wrapper.to_wrap.weight, f"{path}.to_wrap.weight", a, b)
        return
    local_experts = _local_experts(wrapper)
    first = parallel_state.get_expert_model_parallel_rank() * local_experts
    sequential = re.search(r"\.local_experts\.(\d+)\.", name)
    if sequential:
        expert = first + int(sequential[1])
        name = name.replace(sequential[0], f".{expert}.")
        yield _shard(name, layer, expert, wrapper, wrapper.to_wrap.weight, f"{path}.to_wrap.weight", a, b)
        return
    for index in range(local_experts):
        expert_name = name.replace(".experts.", f".experts.{first + index}.")
        weight_name = f"weight{index}"
        base = getattr(wrapper.to_wrap, weight_name)
        # A shared adapter (share_expert_adapters) is one matrix for all local experts.
        base_path = f"{path}.to_wrap.{weight_name}"
        place = index if a.dim() == 3 else None
        own_a, own_b = (a, b) if place is None else (a[place], b[place])
        shard = _shard(expert_name, layer, first + index, wrapper, base, base_path, own_a, own_b, place)
        yield replace(shard, shared=place is None)


def _local_experts(wrapper: AdapterWrapper) -> int:
    return wrapper.to_wrap.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()


def _shard(
    name: str,
    layer: int,
    expert: int | None,
    wrapper: AdapterWrapper,
    base: torch.Tensor,
    base_name: str,
    a: torch.Tensor,
    b: torch.Tensor,
    index: int | None = None,
) -> AdapterShard:
    linear = name.rpartition(".")[2]
    adapter = wrapper.adapter
    if expert is None:
        group = parallel_state.get_tensor_model_parallel_group()
        kind = f"shared_experts.{linear}" if ".shared_experts." in name else linear
    else:
        group = parallel_state.get_expert_tensor_parallel_group()
        kind = f"experts.{linear}"
    rank, size = group.rank(), group.size()
    gated = linear == "linear_fc1" and wrapper.to_wrap.config.gated_linear_unit
    by_input = linear in ROW_PARALLEL
    return AdapterShard(
        name=name,
        kind=kind,
        layer=layer,
        expert=expert,
        base=base,
        base_name=base_name,
        a=a,
        b=b,
        a_parameter=adapter.linear_in.weight,
        b_parameter=adapter.linear_out.weight,
        a_slice=Slice(1 if by_input else 0, rank, size),
        b_slice=Slice(0, rank, size, gated=gated),
        base_slice=Slice(1 if by_input else 0, rank, size, gated=gated),
        scale=adapter.alpha / adapter.dim,
        group=group,
        index=index,
    )


def full_shapes(adapter: AdapterShard) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of the full A [rank, in] and B [out, rank]."""

    def scaled(shard: torch.Tensor, where: Slice) -> tuple[int, int]:
        shape = list(shard.shape)
        shape[where.axis] *= where.size
        return shape[0], shape[1]

    return scaled(adapter.a, adapter.a_slice), scaled(adapter.b, adapter.b_slice)


def write(shard: torch.Tensor, where: Slice, full: torch.Tensor) -> None:
    """Put this rank's part of a full tensor into a shard."""
    shard.detach().copy_(where.of(full))
