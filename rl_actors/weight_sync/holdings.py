"""What one member of the sync holds, in Hugging Face coordinates; for Megatron ranks, read from the model.

Names come from Megatron-Bridge's own mapping, geometry from the mapping's kind and the rank's place in the layout, so
any model whose adapted linears are plain, gated or fused query-key-value works.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from rl_actors.errors import SyncError
from rl_actors.weight_sync import shards
from rl_actors.weight_sync.factors import factors_of
from rl_actors.weight_sync.ipc_memory import place
from rl_actors.weight_sync.lora_slot import factor_name
from rl_actors.weight_sync.shards import Box, Heads, Piece

if TYPE_CHECKING:
    from rl_actors.trainer.lora import AdapterShard
    from rl_actors.trainer.model import TrainerModel


@dataclass(frozen=True)
class Holdings:
    """One member's pieces, to be sent to the driver.

    Attributes:
        adapted: of the tensors that a sync sends (trainer) or may receive (engine: all).
        fixed: of all other parameters whose values can be read, for the check at the start.
        dtype: of the weights.
        device: "cpu" or "cuda", where they are.
        place: "node/GPU UUID" or "node/cpu".
        unread: names of parameters that cannot be compared.
    """

    adapted: list[Piece]
    fixed: list[Piece]
    dtype: torch.dtype
    device: str
    place: str
    unread: list[str] = field(default_factory=list)


class TrainerShards:
    """This Megatron rank's parameters by global name, with their pieces.

    Adapted weights go by the name their adapters have for them (`layers.0.self_attention.linear_qkv`), all others by
    Megatron's global parameter name (`decoder.layers.0.input_layernorm.weight`), factors as in `weight_sync.factors`.

    Args:
        send_factors: a sync sends A and B (`sync.mode: adapter`), not the merged weights.
    """

    def __init__(self, model: TrainerModel, send_factors: bool = False) -> None:
        self._send_factors = send_factors
        self._model = model
        self._registry = model.bridge._model_bridge.mapping_registry()
        self._heads = Heads(model.shape.heads, model.shape.kv_heads, model.shape.head_dim)
        self.tensors: dict[str, torch.Tensor] = {adapter.weight: adapter.base for adapter in model.adapters}

    def holdings(self) -> Holdings:
        """Raises SyncError if an adapted weight cannot be expressed in Hugging Face coordinates."""
        adapted: list[Piece] = []
        fixed: list[Piece] = []
        # One weight may have an adapter for each of its parts (but in adapter mode it has one).
        for adapter in {adapter.weight: adapter for adapter in self._model.adapters}.values():
            base = self._adapted(adapter)
            adapted += self._factors(adapter, base) if self._send_factors else base
            fixed += base if self._send_factors else []
        unread: list[str] = []
        for name, parameter, where in self._others():
            pieces = self._pieces(name, name, parameter, *where)
            self.tensors[name] = parameter
            fixed += pieces or []
            unread += [name] if pieces is None else []
        device = self._model.torch_device.type
        return Holdings(adapted, fixed, self._model.config.params_dtype, device, place(device), unread)

    def _adapted(self, adapter: AdapterShard) -> list[Piece]:
        where = adapter.base_slice
        return self._mapped(adapter, adapter.weight, adapter.base, where.axis, where.rank, where.size)

    def _factors(self, adapter: AdapterShard, base: list[Piece]) -> list[Piece]:
        """A goes by the name of its first linear; the rows of B belong to its linears as those of the weight do."""
        pieces: list[Piece] = []
        for factor in factors_of(adapter):
            param, shape, where = factor.param, tuple(factor.shard.shape), factor.where
            if factor.part == "A":
                name = factor_name(base[0].box.name, "A")
                by_rows = shards.rows(param, name, shape, where.rank, where.size)
                found = by_rows if where.axis == 0 else shards.columns(param, name, shape, where.rank)
            else:
                rows = self._mapped(adapter, param, factor.shard, 0, where.rank, where.size)
                found = [replace(one, box=Box(factor_name(one.box.name, "B"), one.box.slices)) for one in rows]
            pieces += found if factor.index is None else shards.expert(found, param, factor.index)
        return pieces

    def _mapped(
        self, adapter: AdapterShard, param: str, tensor: torch.Tensor, axis: int, rank: int, size: int
    ) -> list[Piece]:
        """Pieces of something shaped, in its rows, like the adapted weight."""
        for name in _megatron_names(adapter):
            pieces = self._pieces(param, name, tensor, axis, rank, size)
            if pieces is not None:
                return pieces
        raise SyncError(
            f"{adapter.weight} has an adapter, but its weight has no Hugging Face tensor that an engine could take: "
            "leave it out with lora.exclude"
        )

    def _pieces(
        self, param: str, megatron_name: str, tensor: torch.Tensor, axis: int | None, rank: int, size: int
    ) -> list[Piece] | None:
        """None if Bridge has no mapping, or one of a kind that this file does not know."""
        from megatron.bridge.models.conversion.param_mapping import GatedMLPMapping, QKVMapping

        mapping = self._registry.megatron_to_hf_lookup(megatron_name)
        if mapping is None:
            return None
        names, shape = mapping.hf_param, tuple(tensor.shape)
        if isinstance(mapping, QKVMapping) and set(names) == {"q", "k", "v"}:
            width = shape[1] if len(shape) == 2 else 0
            return shards.megatron_qkv(param, names, self._heads, width, rank, size)
        if isinstance(mapping, GatedMLPMapping):
            return shards.stacked_rows(param, [names["gate"], names["up"]], shape, rank)
        if not isinstance(names, str):
            return None
        if megatron_name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            name = "model.embed_tokens.weight" if self._model.shape.tied else names
            return shards.rows(param, name, shape, rank, size, limit=self._model.shape.vocab)
        if axis == 0:
            return shards.rows(param, names, shape, rank, size)
        if axis == 1:
            return shards.columns(param, names, shape, rank)
        return shards.whole(param, names, shape)

    def _others(self) -> Iterator[tuple[str, torch.Tensor, tuple[int | None, int, int]]]:
        """(global name, parameter, (split axis, rank, size)) of all frozen parameters without an adapter."""
        from megatron.core import parallel_state
        from megatron.core.transformer.transformer_layer import TransformerLayer
        from megatron.core.utils import unwrap_model

        adapted = {adapter.base.data_ptr() for adapter in self._model.adapters}
        first_expert = 0
        if self._model.shape.is_moe:
            local = self._model.shape.experts // self._model.layout.ep
            first_expert = parallel_state.get_expert_model_parallel_rank() * local
        for chunk in unwrap_model(self._model.chunks):
            layers = {
                name: module.layer_number - 1
                for name, module in chunk.named_modules()
                if isinstance(module, TransformerLayer)
            }
            for path, parameter in chunk.named_parameters():
                if ".adapter." in path or parameter.data_ptr() in adapted:
                    continue
                name = _global_name(path.replace(".to_wrap.", "."), layers, first_expert)
                yield name, parameter.detach(), _place(name, parameter, parallel_state)


def _megatron_names(adapter: AdapterShard) -> list[str]:
    """The global parameter names under which Bridge may know an adapted weight (experts: one by one, or grouped)."""
    if adapter.expert is None:
        return [f"decoder.{adapter.weight}.weight"]
    block, _, linear = f"decoder.{adapter.weight}".partition(f".experts.{adapter.expert}.")
    return [
        f"{block}.experts.local_experts.{adapter.expert}.{linear}.weight",
        f"{block}.experts.{linear}.weight{adapter.expert}",
    ]


def _global_name(path: str, layers: dict[str, int], first_expert: int) -> str:
    """A parameter's path with the layer and expert numbers of the whole model."""
    for prefix, layer in layers.items():
        if path.startswith(prefix + "."):
            path = f"{prefix.rpartition('.')[0]}.{layer}.{path[len(prefix) + 1 :]}"
            break
    if ".local_experts." in path:
        block, _, rest = path.partition(".local_experts.")
        index, _, rest = rest.partition(".")
        return f"{block}.local_experts.{first_expert + int(index)}.{rest}"
    if ".experts.linear_fc" in path:
        stem, _, index = path.rpartition(".weight")
        return f"{stem}.weight{first_expert + int(index)}" if index.isdigit() else path
    return path


def _place(name: str, parameter: torch.Tensor, parallel_state: Any) -> tuple[int | None, int, int]:
    """(split axis or None, tensor-parallel rank, size), from the attributes that Megatron sets on split parameters."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None, 0, 1
    expert = ".experts." in name and ".shared_experts." not in name
    group = (
        parallel_state.get_expert_tensor_parallel_group()
        if expert
        else parallel_state.get_tensor_model_parallel_group()
    )
    return int(getattr(parameter, "partition_dim", 0)), group.rank(), group.size()
