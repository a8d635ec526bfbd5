"""vLLM's own LoRA as a receiver: one adapter slot in each engine worker, filled in memory, never from a file.

vLLM keeps the A and B of its active adapters in stacked buffers whose first axis is the slot. `open_slot` registers one
adapter of zeros through vLLM's adapter manager and pins it; from then on it is never loaded or evicted, every request
names it (`lora_request`), and a sync writes A and scale * B straight into its slot. Buffers keep their addresses, so
CUDA graphs stay valid.

Global tensors have PEFT's names: `model.layers.3.self_attn.q_proj.lora_A.weight` [rank, in] and `...lora_B.weight`
[out, rank]. Query, key and value, and gate and up, have one A: it travels once, under the first one's name, and is
copied to the others on arrival.

Invariant: rows and columns beyond the adapter's rank stay zero; before the first sync the engine is its base model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rl_actors.errors import SyncError
from rl_actors.weight_sync.shards import Box, Piece

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

ADAPTER_ID = 1
_ATTRIBUTE = "_rl_actors_lora_slot"


def lora_request() -> LoRARequest:
    """What every request carries to be answered with the slot's adapter. vLLM wants a path; nothing is read from it."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name="trainer", lora_int_id=ADAPTER_ID, lora_path="in memory, by weight sync")


def factor_name(weight: str, factor: str) -> str:
    """PEFT's name of the "A" or "B" under a Hugging Face weight's name."""
    return f"{weight.removesuffix('.weight')}.lora_{factor}.weight"


@dataclass
class SlotModule:
    """The slot's A and B of one module of a worker; a sync writes straight into them.

    Attributes:
        name: of the module in the worker's model.
        tensors: views of the slot; "lora_a_0" is of the first of `lora_a_stacked`. Linears have [rows, columns],
            experts [expert, rows, columns].
        pieces: where global tensors lie in them; the pieces' parameter names are "module.tensor".
        twins: pairs of tensors; the second is a copy of the first.
    """

    name: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    twins: list[tuple[str, str]] = field(default_factory=list)
    direct: bool | None = True

    @property
    def kind(self) -> tuple[Any, ...]:
        """Modules of one kind, for the log."""
        return type(self), None, (("LoRA slot", tuple(tuple(tensor.shape) for tensor in self.tensors.values())),)

    def tensor(self, leaf: str) -> torch.Tensor:
        """What values of `leaf` are written into."""
        return self.tensors[leaf]

    def finish(self, staged: dict[str, torch.Tensor] | None) -> bool:
        """All values are in place. Never through vLLM's reload: returns False."""
        for source, copy in self.twins:
            self.tensors[copy].copy_(self.tensors[source])
        return False


def open_slot(model: nn.Module, rank: int, normalize_experts: bool) -> None:
    """Give a worker of an engine with `enable_lora` its one adapter, of zeros. Before its first request.

    Args:
        rank: of the adapters.
        normalize_experts: `lora.normalize_moe_lora`, experts have rank // top-k.
    """
    manager: Any = model.lora_manager
    # Rank 1 is the smallest set of zeros that marks every module's slot as in use.
    manager.add_adapter(manager.create_dummy_lora(ADAPTER_ID, 1, getattr(model, "embedding_modules", {})))
    manager.pin_adapter(ADAPTER_ID)
    slot = manager.lora_index_to_id.index(ADAPTER_ID)
    packed = manager.packed_modules_mapping
    model.__dict__[_ATTRIBUTE] = [
        slot_module(name, module, slot, rank, normalize_experts, packed) for name, module in manager.modules.items()
    ]


def slot_of(model: nn.Module) -> list[SlotModule]:
    """What `open_slot` found; nothing if the engine serves merged weights."""
    return model.__dict__.get(_ATTRIBUTE, [])


def slot_module(
    name: str, module: Any, slot: int, rank: int, normalize_experts: bool, packed: dict[str, list[str]]
) -> SlotModule:
    """The slot's view of one of vLLM's LoRA layers.

    Raises:
        SyncError: a layer of a kind that is not known here.
    """
    from vllm.lora.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA

    made = SlotModule(name)
    if isinstance(module, FusedMoEWithLoRA) and not isinstance(module, FusedMoE3DWithLoRA):
        expert_rank = rank // module.moe_config.experts_per_token if normalize_experts else rank
        for which in ("w13_lora_a", "w13_lora_b", "w2_lora_a", "w2_lora_b"):
            for index, stacked in enumerate(getattr(module, f"{which}_stacked")):
                made.tensors[f"{which}_{index}"] = stacked[slot]
        made.twins = _twins("w13_lora_a", len(module.w13_lora_a_stacked))
        made.pieces = list(_expert_pieces(name, module, expert_rank))
    else:
        for which in ("lora_a", "lora_b"):
            for index, stacked in enumerate(getattr(module, f"{which}_stacked", ())):
                made.tensors[f"{which}_{index}"] = stacked[slot, 0]
        made.twins = _twins("lora_a", len(getattr(module, "lora_a_stacked", ())))
        made.pieces = list(_linear_pieces(name, module, rank, packed))
    return made


def _twins(stacked: str, count: int) -> list[tuple[str, str]]:
    return [(f"{stacked}_0", f"{stacked}_{index}") for index in range(1, count)]


def _linear_pieces(name: str, module: Any, rank: int, packed: dict[str, list[str]]) -> Iterator[Piece]:
    """Geometry as in the layers' own `slice_lora_a` and `slice_lora_b`."""
    from vllm.lora import layers

    path, _, leaf = name.rpartition(".")
    width = module.lora_a_stacked[0].shape[-1]
    heights = [stacked.shape[-2] for stacked in module.lora_b_stacked]
    first_column, parts, numbers = 0, [leaf], [0]
    if isinstance(module, layers.RowParallelLinearWithLoRA):
        first_column = module.tp_rank * width
    elif isinstance(module, (layers.MergedColumnParallelLinearWithLoRA, layers.MergedQKVParallelLinearWithLoRA)):
        parts, numbers = packed[leaf], list(module.output_ids)
    elif type(module) is layers.ColumnParallelLinearWithLoRA and not module.is_merged_col_linear:
        numbers = [module.tp_rank]
    elif not isinstance(module, layers.ReplicatedLinearWithLoRA):
        raise SyncError(
            f"{name} is a {type(module).__name__}, whose LoRA cannot be filled in memory: use sync.mode = merged"
        )
    columns = (first_column, first_column + width)
    a = factor_name(f"{path}.{parts[0]}", "A")
    yield Piece(Box(a, ((0, rank), columns)), f"{name}.lora_a_0", ((0, rank), (0, width)))
    for index, (part, height, number) in enumerate(zip(parts, heights, numbers, strict=True)):
        rows = (number * height, (number + 1) * height)
        b = factor_name(f"{path}.{part}", "B")
        yield Piece(Box(b, (rows, (0, rank))), f"{name}.lora_b_{index}", ((0, height), (0, rank)))


def _expert_pieces(name: str, module: Any, rank: int) -> Iterator[Piece]:
    """Tensor after tensor with all experts in each, so that what lies one below the other is copied in one go."""
    routed = module.base_layer.routed_experts
    local = {
        expert: expert if routed.expert_map is None else routed._map_global_expert_id_to_local_expert_id(expert)
        for expert in range(routed.global_num_experts)
    }
    gate, up, down = routed.ckpt_gate_proj_name, routed.ckpt_up_proj_name, routed.ckpt_down_proj_name
    hidden, inner, number = module.hidden_size, module.intermediate_size_per_partition, module.tp_rank
    placed: list[tuple[str, str, str, tuple[int, int], tuple[int, int]]] = [
        ("w13_lora_a_0", gate, "A", (rank, hidden), (0, 0)),
        *(
            (f"w13_lora_b_{index}", part, "B", (inner, rank), (number * inner, 0))
            for index, part in enumerate((gate, up))
        ),
        ("w2_lora_a_0", down, "A", (rank, inner), (0, number * inner)),
        ("w2_lora_b_0", down, "B", (hidden, rank), (0, 0)),
    ]
    for tensor, linear, factor, (height, width), (row, column) in placed:
        for expert, index in local.items():
            if index >= 0:
                slices = ((row, row + height), (column, column + width))
                box = Box(factor_name(f"{name}.{expert}.{linear}", factor), slices)
                yield Piece(box, f"{name}.{tensor}", ((index, index + 1), (0, height), (0, width)))
