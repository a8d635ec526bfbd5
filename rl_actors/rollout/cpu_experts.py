"""LoRA on experts for vLLM's CPU build, which has it for all other layers.

vLLM 0.26 computes experts on CPU in one piece (its own "monolithic" path without a modular kernel), and its LoRA layer
for experts hooks into modular kernels only. What is lent here is that layer's computation. Buffers, slots and mapping
stay vLLM's own, so the rest of adapter mode is the same code as on GPU, where this file is not used. Experts are then
computed one by one with plain matrix products, whose middle the fused CPU kernel does not give out.

Import it in an engine's process only, after `prepare_process`. It can go when `FusedMoEWithLoRA` accepts a CPU backend;
now its constructor asserts that it is not monolithic.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.lora import utils
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.layers import FusedMoEWithLoRA as GpuExperts
from vllm.model_executor.layers.fused_moe import cpu_fused_moe

_LORA = "_rl_actors_lora"


def lend_expert_lora() -> None:
    """Before vLLM makes an engine in this process. Engines without LoRA compute their experts as before."""
    cpu_fused_moe.CPUFusedMOE = Experts  # type: ignore[misc]
    utils._all_lora_classes = tuple(FusedMoEWithLoRA if one is GpuExperts else one for one in utils._all_lora_classes)


class FusedMoEWithLoRA(GpuExperts):  # vLLM asks for this class by its name
    """The stacked A and B of all experts, without a modular kernel."""

    def __init__(self, base_layer: Any) -> None:
        BaseLayerWithLoRA.__init__(self)
        self.base_layer = base_layer
        self.moe_config = base_layer.moe_config
        routed = base_layer.routed_experts
        routed.lora_base_layer_prefix = "base_layer."
        # Not as an attribute of the module: each would contain the other.
        routed.__dict__[_LORA] = self
        parallel = self.moe_config.moe_parallel_config
        self.tp_size, self.tp_rank = parallel.tp_size, parallel.tp_rank
        self.device = torch.device("cpu")
        self._w13_slices = 2
        self.enable_moe_shared_loras = False
        self.n_slices = self.local_num_experts * (self._w13_slices + 1)

    def set_mapping(self, punica_wrapper: Any) -> None:
        BaseLayerWithLoRA.set_mapping(self, punica_wrapper)

    def shrink_expand(self, x: torch.Tensor, slots: torch.Tensor, expert: int, which: str) -> torch.Tensor:
        """B A x [tokens, out] of one expert in float32; `slots` [tokens] are their adapters, -1 for none."""
        pairs = zip(getattr(self, f"{which}_lora_a_stacked"), getattr(self, f"{which}_lora_b_stacked"), strict=True)
        change = torch.cat([_product(x, a[:, expert], b[:, expert], slots) for a, b in pairs], dim=-1)
        return change.to(x.dtype)


class Experts(cpu_fused_moe.CPUFusedMOE):
    """vLLM's CPU experts; one by one where LoRA is on."""

    def check_grouped_gemm(self, layer: Any) -> tuple[bool, str]:
        # When weights are loaded the LoRA layer is not there yet; when they are reloaded the configuration is not.
        config = get_current_vllm_config_or_none()
        with_lora = _LORA in layer.__dict__ or (config is not None and config.lora_config is not None)
        return (False, "none") if with_lora else super().check_grouped_gemm(layer)

    def forward_torch(
        self,
        layer: Any,
        input: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int = -1,
        skip_weighted: bool = False,
    ) -> torch.Tensor:
        lora = layer.__dict__.get(_LORA)
        if lora is None or skip_weighted:
            return super().forward_torch(
                layer, input, topk_weights, topk_ids, activation, global_num_experts, skip_weighted
            )
        slots = lora.punica_wrapper.token_lora_indices
        output = torch.zeros_like(input, dtype=topk_weights.dtype)
        for expert in range(len(layer.gate_up_linear)):
            tokens, choice = (topk_ids == expert).nonzero(as_tuple=True)
            if not len(tokens):
                continue
            x, adapters = input[tokens], slots[tokens]
            inner = layer.gate_up_linear[expert](x) + lora.shrink_expand(x, adapters, expert, "w13")
            inner = cpu_fused_moe._CPU_MOE_ACT_FN[activation](inner)
            out = layer.down_linear[expert](inner) + lora.shrink_expand(inner, adapters, expert, "w2")
            output.index_add_(0, tokens, out.to(output.dtype) * topk_weights[tokens, choice, None])
        return output.to(input.dtype)


def _product(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    out = x.new_zeros(len(x), b.shape[1], dtype=torch.float32)
    for slot in range(len(a)):
        mine = (slots == slot).nonzero()[:, 0]
        if len(mine):
            out[mine] = x[mine].float() @ a[slot].float().t() @ b[slot].float().t()
    return out
