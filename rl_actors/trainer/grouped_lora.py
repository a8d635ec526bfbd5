"""Bridge's per-expert adapters on Transformer Engine's grouped linears, computed by `grouped_gemm`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.bridge.peft.lora_layers import LoRALinear
from megatron.bridge.peft.utils import GroupedExpertLinearAdapter
from torch import nn

from rl_actors.trainer.grouped_gemm import by_expert, grouped_lora

ALIGNMENT = 16
"""Bytes to which grouped GEMM wants the rows of its matrices aligned."""


class GroupedLoRALinear(LoRALinear):
    """Bridge's wrapper of Transformer Engine's grouped linear, computed by grouped GEMMs over stacked weights.

    The module tree and the parameters are those of Bridge and Transformer Engine: `weight0`, `weight1`, ... become
    views of one tensor when `stack_weights` is called, which must be after the model is on its device.
    """

    def __init__(self, to_wrap: nn.Module, adapter: nn.Module) -> None:
        super().__init__(to_wrap, adapter)
        self._stacked: torch.Tensor | None = None

    @torch.no_grad()
    def stack_weights(self) -> None:
        """Lay the frozen weights of the local experts out as one tensor [experts, out, in]."""
        weights = [getattr(self.to_wrap, f"weight{index}") for index in range(self.to_wrap.num_gemms)]
        self._stacked = torch.stack([weight.detach() for weight in weights])
        for weight, place in zip(weights, self._stacked, strict=True):
            weight.data = place

    def forward(self, x: torch.Tensor, m_splits: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        """(output [tokens, out], no bias).

        Args:
            x: [tokens, in], tokens of local expert 0 first, then of expert 1, ...
            m_splits: tokens of each local expert; may be 0.
        """
        if self._stacked is None:
            raise RuntimeError("stack_weights was not called")
        ends = torch.tensor(m_splits, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(x.device, non_blocking=True)
        if not self._adapter_enabled:
            return by_expert(x, self._stacked.transpose(1, 2), ends), None
        adapter = self.adapter
        scale = adapter.alpha / adapter.dim
        a, b = adapter.linear_in(), adapter.linear_out()
        if isinstance(adapter.dropout, nn.Identity):
            return grouped_lora(x, self._stacked, a, b, ends, scale), None
        base = by_expert(x, self._stacked.transpose(1, 2), ends)
        low = by_expert(adapter.dropout(x), a.transpose(1, 2), ends) * scale
        return base + by_expert(low, b.transpose(1, 2), ends), None


def use_grouped_gemm(wrapper: nn.Module) -> nn.Module:
    """`wrapper` computed by grouped GEMMs, if it is one of per-expert adapters whose shapes allow them."""
    adapter = getattr(wrapper, "adapter", None)
    if not isinstance(wrapper, LoRALinear) or not isinstance(adapter, GroupedExpertLinearAdapter):
        return wrapper
    weights = (wrapper.to_wrap.weight0, adapter.linear_in.weight, adapter.linear_out.weight)
    aligned = all(size * weight.dtype.itemsize % ALIGNMENT == 0 for weight in weights for size in weight.shape[-2:])
    if not aligned or wrapper.to_wrap.use_bias:
        return wrapper
    return GroupedLoRALinear(wrapper.to_wrap, adapter)


def stack_weights(chunks: Iterable[nn.Module]) -> None:
    """Call `GroupedLoRALinear.stack_weights` wherever a model has one."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, GroupedLoRALinear):
                module.stack_weights()
