"""The variants of LoRA: which adapters each puts on which linear.

`lora` is one adapter for each of Megatron's linears; `canonical_lora` splits fused ones into the parts that other
libraries adapt; `dora` is `lora` with trained row lengths. All keep TargetedLoRA's way of choosing modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
from megatron.bridge.peft.lora_layers import LoRALinear
from megatron.bridge.peft.utils import (
    GroupedExpertLinearAdapter,
    ParallelLinearAdapter,
    get_adapter_attributes_from_linear,
    get_effective_lora_dim,
    is_expert_linear,
    is_grouped_expert_linear,
)
from torch import nn

from rl_actors.errors import ConfigError
from rl_actors.lora_config import FUSED_PARTS, LoraConfig
from rl_actors.trainer.grouped_lora import GroupedLoRALinear
from rl_actors.trainer.lora import TargetedLoRA, adaptable
from rl_actors.trainer.wrappers import CanonicalLinear, DoRALinear, FusedRows, GroupedDoRALinear


def make_lora(config: LoraConfig) -> TargetedLoRA:
    """Bridge's LoRA from our configuration."""
    variants = {"lora": TargetedLoRA, "canonical_lora": TargetedCanonicalLoRA, "dora": TargetedDoRA}
    return variants[config.variant](
        target_modules=list(config.targets),
        dim=config.rank,
        alpha=config.alpha,
        dropout=config.dropout,
        lora_A_init_method=config.a_init,
        lora_B_init_method=config.b_init,
        share_expert_adapters=config.share_expert_adapters,
        normalize_moe_lora=config.normalize_moe_lora,
        excluded=config.exclude,
        scaling=config.scaling,
    )


@dataclass
class TargetedDoRA(TargetedLoRA):
    """LoRA whose wrappers also have a magnitude."""

    def transform(self, module: nn.Module, name: str | None = None, prefix: str | None = None) -> nn.Module:
        wrapped = super().transform(module, name, prefix)
        if wrapped is module or not isinstance(wrapped, LoRALinear):
            return wrapped
        grouped = isinstance(wrapped, GroupedLoRALinear)
        return (GroupedDoRALinear if grouped else DoRALinear)(wrapped.to_wrap, wrapped.adapter)


@dataclass
class TargetedCanonicalLoRA(TargetedLoRA):
    """LoRA with adapters of their own for query, key, value, gate and up."""

    def match(self, m: nn.Module, name: str | None = None, prefix: str | None = None) -> tuple[str, str] | None:
        if name not in FUSED_PARTS:
            return super().match(m, name, prefix)
        return (name, f"{prefix}.{name}") if self._parts(m, f"{prefix}.{name}") else None

    def _parts(self, module: nn.Module, full_name: str) -> list[str]:
        """The targeted parts of a fused linear."""
        prefix = full_name.rpartition(".")[0]
        names = [part.rpartition(".")[2] for part in adaptable(full_name, canonical=True)]
        return [part for part in names if TargetedLoRA.match(self, module, part, prefix)]

    def transform(self, module: nn.Module, name: str | None = None, prefix: str | None = None) -> nn.Module:
        if name not in FUSED_PARTS or isinstance(module, AdapterWrapper) or self.match(module, name, prefix) is None:
            return super().transform(module, name, prefix)
        full_name = f"{prefix}.{name}"
        fused = _fused_rows(module, name)
        adapters = {part: self._adapter(module, full_name, part, fused) for part in self._parts(module, full_name)}
        return CanonicalLinear(module, adapters, fused)

    def _adapter(self, module: Any, full_name: str, part: str, fused: FusedRows) -> nn.Module:
        """As LoRA.transform makes it, but with the part's rows."""
        expert = is_expert_linear(full_name)
        base = get_adapter_attributes_from_linear(module, is_expert=expert)
        rows = base.out_features * fused.heights[part] // sum(fused.heights.values())
        rank = get_effective_lora_dim(
            module, dim=self.dim, normalize_moe_lora=self.normalize_moe_lora, is_expert=expert
        )
        common: dict[str, Any] = {
            "base_linear_name": f"{full_name.rpartition('.')[0]}.{part}",
            "activation": "identity",
            "column_init_method": self.lora_A_init_method,
            "row_init_method": self.lora_B_init_method,
            "input_is_parallel": base.input_is_parallel,
            "dropout": self.dropout,
            "model_parallel_config": module.config,
            "alpha": self.alpha,
            "base_linear_is_parallel": base.base_linear_is_parallel,
        }
        adapter: nn.Module
        if is_grouped_expert_linear(full_name):
            weight = next(module.parameters())
            adapter = GroupedExpertLinearAdapter(
                base.in_features,
                rows,
                rank,
                num_local_experts=module.num_gemms,
                params_device=weight.device,
                params_dtype=weight.dtype,
                **common,
            )
        else:
            adapter = ParallelLinearAdapter(
                base.in_features,
                rows,
                rank,
                is_expert=expert,
                disable_tensor_parallel_comm=base.disable_tensor_parallel_comm,
                disable_sequence_parallel_comm=base.disable_sequence_parallel_comm,
                **common,
            )
        self.set_scale(adapter)
        return adapter


def _fused_rows(module: Any, name: str) -> FusedRows:
    """How this rank's rows of a fused linear alternate.

    Raises:
        ConfigError: they are not query, key and value, or gate and up, alone.
    """
    weight = getattr(module, "weight", None)
    config, rows = module.config, (module.weight0 if weight is None else weight).shape[0]
    if name == "linear_qkv":
        width, queries = config.kv_channels, config.num_attention_heads // config.num_query_groups
        heights = dict(zip(FUSED_PARTS[name], (queries * width, width, width), strict=True))
        groups, rest = divmod(rows, sum(heights.values()))
        fits = not rest and config.num_query_groups % groups == 0
    else:
        groups, heights = 1, dict.fromkeys(FUSED_PARTS[name], rows // 2)
        fits = config.gated_linear_unit
    if not fits:
        raise ConfigError(f"canonical_lora cannot split {name} of this model: use lora.variant=lora")
    return FusedRows(groups, heights)
