"""What an adapted linear computes, for the variants of LoRA that Megatron-Bridge 0.6.2 does not get right.

Bridge's `CanonicalLoRA` fails in the forward pass when only some parts of a linear are targeted, and leaves grouped
experts unsplit; its `DoRA` takes norms of shards for norms of rows under tensor parallelism, rounds them to the model's
type, and cannot wrap experts. Both keep Bridge's adapters and its `AdapterWrapper`, so the rest finds them as usual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
from megatron.bridge.peft.lora_layers import LoRALinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import nn

from rl_actors.trainer.grouped_lora import GroupedLoRALinear

if TYPE_CHECKING:
    from rl_actors.trainer.adapters import AdapterShard


@dataclass(frozen=True)
class FusedRows:
    """How the rows of a fused weight alternate on this rank: `groups` times the parts, each `heights[part]` rows.

    Query, key and value alternate once for each key-value head (heights in channels); gate and up do not (one group).
    """

    groups: int
    heights: dict[str, int]

    def rows(self, part: str) -> tuple[tuple[int, int], ...]:
        """(start, stop) runs of a part's rows."""
        total, names = sum(self.heights.values()), list(self.heights)
        before = sum(self.heights[name] for name in names[: names.index(part)])
        starts = [group * total + before for group in range(self.groups)]
        return tuple((start, start + self.heights[part]) for start in starts)

    def join(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Outputs [..., groups * height] of some parts as one output [..., rows]; those of absent parts are zero."""
        one = next(iter(parts.values()))
        columns = [
            parts[name].unflatten(-1, (self.groups, height))
            if name in parts
            else one.new_zeros((*one.shape[:-1], self.groups, height))
            for name, height in self.heights.items()
        ]
        return torch.cat(columns, dim=-1).flatten(-2)


class CanonicalLinear(AdapterWrapper):
    """A fused linear with an adapter for each of some of its parts.

    Attributes:
        adapter: adapters by part, such as `linear_q`.
        fused: where the parts lie.
    """

    def __init__(self, to_wrap: nn.Module, adapters: dict[str, nn.Module], fused: FusedRows) -> None:
        super().__init__(to_wrap, nn.ModuleDict(adapters))
        self.fused = fused

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias, x = self.base_linear_forward(x, *args, **kwargs)
        if not self._adapter_enabled:
            return output, bias
        x = x.contiguous()
        parts = {name: adapter(x, *args, **kwargs) for name, adapter in self.adapter.items()}
        return output + self.fused.join(parts).reshape(output.shape), bias


class DoRALinear(LoRALinear):
    """A linear whose weight is `length / |W + scale * B @ A| * (W + scale * B @ A)`, row by row (arXiv 2402.09353).

    The norm |.| is a constant to autograd, as in section 4.3 of the paper, in PEFT and in Bridge. Lengths start as the
    norms of W. What is trained is their difference to these, `adapter.magnitude`, which is zero at the start: that
    makes step 0 the base exactly in any type, and Adam takes the same steps. It is cut over ranks as B is, in every
    layout; where the base is cut over its input, all lengths are gathered for the forward pass.

    Attributes:
        base_norms: float32, in the shape of `adapter.magnitude` [(experts,) rows of B, 1].
        shards: one, or one for each local expert; `adapters.find_adapters` sets them.
    """

    def __init__(self, to_wrap: nn.Module, adapter: nn.Module) -> None:
        super().__init__(to_wrap, adapter)
        b: torch.Tensor = adapter.linear_out.weight  # type: ignore[union-attr, assignment]
        magnitude = nn.Parameter(b.new_zeros((*b.shape[:-1], 1)))
        if hasattr(b, "allreduce"):  # by which Megatron knows experts
            magnitude.allreduce = b.allreduce  # type: ignore[attr-defined]
        adapter.magnitude = magnitude
        self.base_norms = torch.zeros_like(magnitude, dtype=torch.float32, requires_grad=False)
        self.shards: Sequence[AdapterShard] = ()

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(x, *args, **kwargs)
        if not self._adapter_enabled:
            return output, bias
        scale = self._scale(args[0] if args else kwargs.get("m_splits"))
        scaled = output * scale  # in float32
        inner_bias = self.bias if bias is None else None
        if inner_bias is not None and inner_bias.numel():  # it is in the output, and is not to be scaled
            scaled = scaled + (1 - scale) * inner_bias
        return scaled.to(output.dtype), bias

    def _scale(self, m_splits: Any) -> torch.Tensor:
        """length / norm in float32: [out]; [tokens, out] of grouped experts, whose tokens `m_splits` counts."""
        lengths = self.base_norms + self.adapter.magnitude.float()
        first = self.shards[0]
        if first.base_slice.axis == 1 and first.base_slice.size > 1:
            lengths = gather_from_sequence_parallel_region(lengths, group=first.group)
        norms = torch.stack([shard.row_norms() for shard in self.shards])
        scale = lengths.view(norms.shape) / norms
        if first.index is None:
            return scale[0]
        return scale.repeat_interleave(torch.as_tensor(m_splits, device=scale.device), dim=0)


class GroupedDoRALinear(DoRALinear, GroupedLoRALinear):
    """DoRA of experts, W + scale * B @ A by grouped GEMMs."""
