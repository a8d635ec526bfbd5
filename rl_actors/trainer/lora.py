"""LoRA on a Megatron model, the same adapters in every layout.

Megatron-Bridge puts the adapters in; initial values and perturbations are ours, for Bridge draws them shard by shard.
Invariant: a full tensor (see `adapters`) is a function of the seed and its global name alone.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
from megatron.bridge.peft.lora import LoRA
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from rl_actors.errors import ConfigError
from rl_actors.lora_config import FUSED_PARTS, LoraConfig
from rl_actors.targets import selects
from rl_actors.trainer.adapters import AdapterPart, AdapterShard, find_adapters, gather, write
from rl_actors.trainer.grouped_lora import use_grouped_gemm
from rl_actors.trainer.slices import Slice

__all__ = [
    "AdapterPart",
    "AdapterShard",
    "Slice",
    "TargetedLoRA",
    "adapters_off",
    "check_targets",
    "find_adapters",
    "gather",
    "initialize",
    "perturb",
    "write",
]


@dataclass
class TargetedLoRA(LoRA):
    """Bridge's LoRA with its own choice of modules, and rsLoRA's scale.

    It takes exclusions among the targets, which Bridge takes only without targets; linears alone, where Bridge fails on
    what else a wildcard matches; and layer and expert numbers of the whole model, where Bridge's are those of the
    pipeline stage and rank. A dot is a dot: in Bridge 0.6.2 `*.layers.1.*` matches layers 10 to 19 too.
    """

    excluded: tuple[str, ...] = ()
    scaling: str = "standard"
    first_layer: int = 0
    first_expert: int = 0

    def match(self, m: nn.Module, name: str | None = None, prefix: str | None = None) -> tuple[str, str] | None:
        local_name = f"{prefix}.{name}" if prefix else name or ""
        global_name = _global_name(local_name, self.first_layer, self.first_expert)
        if not _is_linear(m) or any(selects(pattern, global_name) for pattern in self.excluded):
            return None
        found = next((pattern for pattern in self.target_modules if selects(pattern, global_name)), None)
        if found is None:
            return None
        self._record_match(found, local_name)  # by which Bridge warns of targets that match nothing
        return found, local_name

    def transform(self, module: nn.Module, name: str | None = None, prefix: str | None = None) -> nn.Module:
        wrapped: nn.Module = use_grouped_gemm(super().transform(module, name, prefix))
        if wrapped is not module and isinstance(wrapped, AdapterWrapper):
            self.set_scale(wrapped.adapter)
        return wrapped

    def set_scale(self, adapter: nn.Module) -> None:
        """Bridge scales with adapter.alpha / adapter.dim, whatever the rank of this adapter is."""
        if self.scaling == "rslora":
            adapter.alpha = self.alpha * math.sqrt(adapter.dim)  # type: ignore[assignment, arg-type]

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


def check_targets(config: LoraConfig, chunks: list[nn.Module]) -> None:
    """Every target and exclusion must match a module of some pipeline stage.

    Raises:
        ConfigError: naming what matches nothing and what is near. Collective.
    """
    modules: set[str] = set()
    for chunk in chunks:
        first = _first_numbers(chunk)
        modules |= {
            part
            for name, module in chunk.named_modules()
            if _is_linear(module)
            for part in adaptable(_global_name(name, *first), config.variant == "canonical_lora")
        }
    # Layers are spread over pipeline stages and experts over expert-parallel ranks.
    for group in (parallel_state.get_pipeline_model_parallel_group(), parallel_state.get_expert_model_parallel_group()):
        if group.size() > 1:
            everyone: list[Any] = [None] * group.size()
            dist.all_gather_object(everyone, modules, group=group)
            modules = set().union(*everyone)
    leaves = sorted({name.rpartition(".")[2] for name in modules})
    for field_name, patterns in (("targets", config.targets), ("exclude", config.exclude)):
        for pattern in patterns:
            if any(selects(pattern, name) for name in modules):
                continue
            near = difflib.get_close_matches(pattern, leaves, n=2, cutoff=0.4) or leaves
            raise ConfigError(
                f"lora.{field_name}: {pattern!r} matches no module of the model: did you mean {' or '.join(near)}?"
            )


def adaptable(name: str, canonical: bool) -> list[str]:
    """What targets and exclusions may call the linear `name`: itself, or the parts that canonical_lora adapts."""
    block, _, linear = name.rpartition(".")
    return [f"{block}.{part}" for part in FUSED_PARTS[linear]] if canonical and linear in FUSED_PARTS else [name]


def _is_linear(module: nn.Module) -> bool:
    return module.__class__.__name__.endswith(("ParallelLinear", "ParallelGroupedLinear"))


def initialize(adapters: list[AdapterShard], config: LoraConfig, seed: int) -> None:
    """Give A its initial values, B zeros and M the norms of the base: the adapted model equals the base. Collective."""

    def fill(full: torch.Tensor, generator: torch.Generator) -> None:
        if config.a_init == "xavier":
            nn.init.xavier_normal_(full, generator=generator)
        elif config.a_init == "kaiming":
            nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)
        else:
            nn.init.normal_(full, std=0.2, generator=generator)  # Bridge's "normal"

    for adapter in _distinct(adapters):
        for part in adapter.parts():
            if part.name == "A":
                write(part.local, part.where, _seeded(adapter, part, seed, fill))
            else:
                part.local.detach().zero_()
            if part.base is not None:
                norms = adapter.row_norms()[:, None]  # B is zero by now
                part.base.copy_(part.where.of(norms) if adapter.base_slice.axis == 1 else norms)


def perturb(adapters: list[AdapterShard], seed: int, scale: float) -> None:
    """Add seeded normal noise of standard deviation `scale` to every A, B and M, whatever the layout."""

    def fill(full: torch.Tensor, generator: torch.Generator) -> None:
        nn.init.normal_(full, std=scale, generator=generator)

    for adapter in _distinct(adapters):
        for part in adapter.parts():
            noise = part.where.of(_seeded(adapter, part, seed, fill))
            part.local.detach().add_(noise.to(part.local.device, part.local.dtype))


def _distinct(adapters: list[AdapterShard]) -> Iterator[AdapterShard]:
    """Each adapter once: with `share_expert_adapters` all experts of a rank have the same one."""
    seen: set[int] = set()
    for adapter in adapters:
        if adapter.shared and id(adapter.a_parameter) in seen:
            continue
        seen.add(id(adapter.a_parameter))
        yield adapter


def _seeded(
    adapter: AdapterShard, part: AdapterPart, seed: int, fill: Callable[[torch.Tensor, torch.Generator], None]
) -> torch.Tensor:
    """A full tensor in float32 on CPU whose values depend on seed, name and part only."""
    name = re.sub(r"\.experts\.\d+\.", ".experts.", adapter.name) if adapter.shared else adapter.name
    digest = hashlib.sha256(f"{seed}:{name}:{part.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    full = torch.empty(part.shape, dtype=torch.float32)
    fill(full, generator)
    return full


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
