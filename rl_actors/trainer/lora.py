"""LoRA on a Megatron model, the same adapters in every layout.

Megatron-Bridge puts the adapters in; this file finds them again and gives each its global name, such as
`layers.3.self_attention.linear_qkv` or `layers.3.mlp.experts.7.linear_fc1`. Everything that must not depend on the
layout (initial values, perturbations, checkpoints, weight sync) goes by that name and by full tensors in this form:

    A: [rank, in]   B: [out, rank]   adapted weight = W + (alpha / rank) * B @ A

with the rows of `linear_fc1` in the order gate, up, and those of `linear_qkv` group by group as Megatron keeps them.
A rank holds a slice of each; `AdapterShard` says which. Invariant: a full tensor is a function of seed and name alone.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.peft.utils import wildcard_match
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from rl_actors.config import LoraConfig
from rl_actors.errors import ConfigError

ROW_PARALLEL = ("linear_proj", "linear_fc2")
"""Kinds whose base weight is split over its input; all others are split over their output."""


@dataclass(frozen=True)
class Slice:
    """Where a shard lies in its full tensor: part `rank` of `size` equal parts of `axis`.

    Attributes:
        gated: the full axis is two halves (gate, up) and the shard holds its part of both, one after the other.
    """

    axis: int
    rank: int
    size: int
    gated: bool = False

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """Cut this shard out of the full tensor."""
        if self.size == 1:
            return full
        halves = full.chunk(2, dim=self.axis) if self.gated else (full,)
        return torch.cat([half.chunk(self.size, dim=self.axis)[self.rank] for half in halves], dim=self.axis)

    def join(self, shards: list[torch.Tensor]) -> torch.Tensor:
        """The full tensor from all `size` shards, in rank order."""
        if not self.gated:
            return torch.cat(shards, dim=self.axis)
        halves = [shard.chunk(2, dim=self.axis) for shard in shards]
        return torch.cat([half[part] for part in (0, 1) for half in halves], dim=self.axis)


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


@dataclass
class TargetedLoRA(LoRA):
    """Bridge's LoRA with two differences in which modules it takes.

    Exclusions among the targets, which Bridge takes only without targets; and layer and expert numbers in wildcards
    are the whole model's, where Bridge's are those of the pipeline stage and rank.
    """

    excluded: tuple[str, ...] = ()
    first_layer: int = 0
    first_expert: int = 0

    def match(self, m: nn.Module, name: str | None = None, prefix: str | None = None) -> tuple[str, str] | None:
        local_name = f"{prefix}.{name}" if prefix else name or ""
        global_name = _global_name(local_name, self.first_layer, self.first_expert)
        if any(name == pattern or wildcard_match(pattern, global_name) for pattern in self.excluded):
            return None
        found = super().match(m, name, global_name.rpartition(".")[0])
        return None if found is None else (found[0], local_name)

    def apply(self, chunk: nn.Module) -> nn.Module:
        """Freeze a model chunk and put the adapters in. Chunks have no wrappers yet."""
        self.first_layer, self.first_expert = _first_numbers(chunk)
        return self([chunk], training=True)[0]


def _first_numbers(chunk: nn.Module) -> tuple[int, int]:
    """Global numbers of this rank's first layer and first expert."""
    layers = [module for module in chunk.modules() if isinstance(module, TransformerLayer)]
    ranks = parallel_state.get_expert_model_parallel_world_size()
    experts = (layers[0].config.num_moe_experts or 0) // ranks if layers else 0
    return layers[0].layer_number - 1 if layers else 0, parallel_state.get_expert_model_parallel_rank() * experts


def _global_name(local_name: str, first_layer: int, first_expert: int) -> str:
    def renumber(match: re.Match[str], first: int) -> str:
        return f"{match[1]}{int(match[2]) + first}"

    name = re.sub(r"(\blayers\.)(\d+)", lambda match: renumber(match, first_layer), local_name)
    return re.sub(r"(\blocal_experts\.)(\d+)", lambda match: renumber(match, first_expert), name)


def make_lora(config: LoraConfig) -> TargetedLoRA:
    """Bridge's LoRA from our configuration."""
    return TargetedLoRA(
        target_modules=list(config.targets),
        dim=config.rank,
        alpha=config.alpha,
        dropout=config.dropout,
        lora_A_init_method=config.a_init,
        lora_B_init_method=config.b_init,
        share_expert_adapters=config.share_expert_adapters,
        normalize_moe_lora=config.normalize_moe_lora,
        excluded=config.exclude,
    )


def check_targets(config: LoraConfig, chunks: list[nn.Module]) -> None:
    """Every target and exclusion must match a module of some pipeline stage.

    Raises:
        ConfigError: naming what matches nothing and what is near. Collective.
    """
    modules: set[str] = set()
    for chunk in chunks:
        first = _first_numbers(chunk)
        modules |= {_global_name(name, *first) for name, module in chunk.named_modules() if _is_linear(module)}
    # Layers are spread over pipeline stages and experts over expert-parallel ranks.
    for group in (parallel_state.get_pipeline_model_parallel_group(), parallel_state.get_expert_model_parallel_group()):
        if group.size() > 1:
            everyone: list[Any] = [None] * group.size()
            dist.all_gather_object(everyone, modules, group=group)
            modules = set().union(*everyone)
    leaves = sorted({name.rpartition(".")[2] for name in modules})
    for field_name, patterns in (("targets", config.targets), ("exclude", config.exclude)):
        for pattern in patterns:
            if any(name.rpartition(".")[2] == pattern or wildcard_match(pattern, name) for name in modules):
                continue
            near = difflib.get_close_matches(pattern, leaves, n=2, cutoff=0.4) or leaves
            raise ConfigError(
                f"lora.{field_name}: {pattern!r} matches no module of the model: did you mean {' or '.join(near)}?"
            )


def _is_linear(module: nn.Module) -> bool:
    return module.__class__.__name__.endswith(("ParallelLinear", "ParallelGroupedLinear"))


def find_adapters(chunks: list[nn.Module]) -> list[AdapterShard]:
    """The adapters of this rank's model chunks, in module order."""
    return [shard for chunk in chunks for shard in _adapters_of(_unwrapped(chunk))]


def _unwrapped(chunk: nn.Module) -> nn.Module:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


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
        yield _shard(expert_name, layer, first + index, wrapper, base, base_path, own_a, own_b, place)


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


def initialize(adapters: list[AdapterShard], config: LoraConfig, seed: int) -> None:
    """Give A its initial values and B zeros: the adapted model equals the base."""

    def fill(full: torch.Tensor, generator: torch.Generator) -> None:
        if config.a_init == "xavier":
            nn.init.xavier_normal_(full, generator=generator)
        elif config.a_init == "kaiming":
            nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)
        else:
            nn.init.normal_(full, std=0.2, generator=generator)  # Bridge's "normal"

    for adapter in adapters:
        write(adapter.a, adapter.a_slice, _seeded(adapter, "A", seed, fill))
        adapter.b.detach().zero_()


def perturb(adapters: list[AdapterShard], seed: int, scale: float) -> None:
    """Add seeded normal noise of standard deviation `scale` to every A and B, whatever the layout."""

    def fill(full: torch.Tensor, generator: torch.Generator) -> None:
        nn.init.normal_(full, std=scale, generator=generator)

    for adapter in adapters:
        for part, shard, where in (("A", adapter.a, adapter.a_slice), ("B", adapter.b, adapter.b_slice)):
            noise = where.of(_seeded(adapter, part, seed, fill))
            shard.detach().add_(noise.to(shard.device, shard.dtype))


def full_shapes(adapter: AdapterShard) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of the full A [rank, in] and B [out, rank]."""

    def scaled(shard: torch.Tensor, where: Slice) -> tuple[int, int]:
        shape = list(shard.shape)
        shape[where.axis] *= where.size
        return shape[0], shape[1]

    return scaled(adapter.a, adapter.a_slice), scaled(adapter.b, adapter.b_slice)


def _seeded(
    adapter: AdapterShard, part: str, seed: int, fill: Callable[[torch.Tensor, torch.Generator], None]
) -> torch.Tensor:
    """A full tensor in float32 on CPU whose values depend on seed, name and part only."""
    digest = hashlib.sha256(f"{seed}:{adapter.name}:{part}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    full = torch.empty(full_shapes(adapter)[0 if part == "A" else 1], dtype=torch.float32)
    fill(full, generator)
    return full


def write(shard: torch.Tensor, where: Slice, full: torch.Tensor) -> None:
    """Put this rank's part of a full tensor into a shard."""
    shard.detach().copy_(where.of(full))


@contextmanager
def adapters_off(chunks: list[nn.Module]) -> Iterator[None]:
    """Within this context the model is its frozen base, exactly: the adapters are not computed at all."""
    wrappers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, AdapterWrapper)]
    for wrapper in wrappers:
        wrapper.disable_adapter_layers()
    try:
        yield
    finally:
        for wrapper in wrappers:
            wrapper.enable_adapter_layers()
