"""From our adapters' names to the linears of the Hugging Face model they adapt.

Megatron fuses query, key and value, and gate and up; an adapter of a fused linear is the same A for all of them and
each one's rows of B. An adapter of a part (`linear_q`) is that of one linear, its rows already in order. Invariant:
rows of the Hugging Face weight stand in its own order, so `B[rows]` fits it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from placement.model_shape import ModelShape
from rl_actors.errors import CheckpointError
from rl_actors.weight_sync import shards

_NAME = re.compile(r"layers\.(\d+)\.(self_attention|mlp)\.(?:(experts\.\d+)\.)?(linear_\w+)")

_PARTS = {
    "linear_q": "q_proj",
    "linear_k": "k_proj",
    "linear_v": "v_proj",
    "linear_fc1_gate": "gate_proj",
    "linear_fc1_up": "up_proj",
}


@dataclass(frozen=True)
class HFLinear:
    """One linear of the Hugging Face model and its rows in the adapter's B.

    Attributes:
        module: such as `model.layers.3.self_attn.q_proj`; its weight is `module + ".weight"`.
        rows: (start, stop) runs of B's rows, one below the other.
    """

    module: str
    rows: tuple[tuple[int, int], ...]

    @property
    def weight(self) -> str:
        return f"{self.module}.weight"

    def of(self, b: torch.Tensor) -> torch.Tensor:
        """This linear's rows of the full B."""
        return (
            torch.cat([b[start:stop] for start, stop in self.rows]) if len(self.rows) > 1 else b[slice(*self.rows[0])]
        )


def hf_linears(name: str, out: int, shape: ModelShape) -> list[HFLinear]:
    """The linears that the adapter `name` with `out` rows in B adapts.

    Raises:
        CheckpointError: Hugging Face's name of this layer is not known here.
    """
    match = _NAME.fullmatch(name)
    if match:
        layer, _, expert, linear = match.groups()
        block = f"model.layers.{layer}"
        mlp = f"{block}.mlp.{expert}" if expert else f"{block}.mlp"
        if linear in _PARTS:
            parent = f"{block}.self_attn" if linear in ("linear_q", "linear_k", "linear_v") else mlp
            return [HFLinear(f"{parent}.{_PARTS[linear]}", ((0, out),))]
        match linear:
            case "linear_qkv":
                return _qkv(f"{block}.self_attn", shape)
            case "linear_proj":
                return [HFLinear(f"{block}.self_attn.o_proj", ((0, out),))]
            case "linear_fc1":
                half = out // 2
                return [HFLinear(f"{mlp}.gate_proj", ((0, half),)), HFLinear(f"{mlp}.up_proj", ((half, out),))]
            case "linear_fc2":
                return [HFLinear(f"{mlp}.down_proj", ((0, out),))]
    raise CheckpointError(f"adapter {name} cannot be exported: its name in the Hugging Face model is not known")


def _qkv(attention: str, shape: ModelShape) -> list[HFLinear]:
    heads = shards.Heads(shape.heads, shape.kv_heads, shape.head_dim)
    names = {part: f"{attention}.{part}_proj" for part in "qkv"}
    runs: dict[str, list[tuple[int, tuple[int, int]]]] = {name: [] for name in names.values()}
    for piece in shards.megatron_qkv("", names, heads, 0, 0, 1):
        runs[piece.box.name].append((piece.box.slices[0][0], piece.local[0]))
    return [HFLinear(name, tuple(rows for _, rows in sorted(found))) for name, found in runs.items()]
