"""What a vLLM worker holds, in Hugging Face coordinates, and how new values get into it.

Each parameter is written in the form it has right after loading (its *model form*). Where the kernels use that form,
values go straight into the parameter, whose address CUDA graphs keep. Where vLLM turns it into something else after
loading (packed for the CPU, shuffled for a MoE kernel), the whole module is collected in its model form and goes
through vLLM's layerwise reload, which also keeps addresses.

Invariant: which way a kind of module takes is tried out on one module of that kind, not assumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rl_actors.errors import SyncError
from rl_actors.weight_sync import shards
from rl_actors.weight_sync.shards import Heads, Piece

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


@dataclass
class WorkerModule:
    """A module with its own parameters.

    Attributes:
        name, module: as in the model.
        shapes: of its parameters in model form, by name.
        pieces: of all its parameters; the pieces' parameter names are "module.parameter".
        direct: values may be written straight into its parameters; None until it has been tried out.
    """

    name: str
    module: nn.Module
    shapes: dict[str, tuple[int, ...]]
    pieces: list[Piece] = field(default_factory=list)
    direct: bool | None = None

    @property
    def kind(self) -> tuple[Any, ...]:
        """Modules of one kind take the same way."""
        method = getattr(self.module, "quant_method", None)
        return type(self.module), type(method), tuple(self.shapes.items())

    @property
    def readable(self) -> bool:
        """Whether the parameters still have the shapes of the model form."""
        return all(tuple(getattr(self.module, name).shape) == shape for name, shape in self.shapes.items())

    def tensor(self, leaf: str) -> torch.Tensor:
        """What values of `leaf` are written into, if written directly."""
        return getattr(self.module, leaf).data  # type: ignore[no-any-return]

    def finish(self, staged: dict[str, torch.Tensor] | None) -> bool:
        """All values are in place, or collected in `staged`; returns whether the module was reloaded."""
        if staged:
            reload(self.module, staged)
        return bool(staged)


def worker_modules(model: nn.Module) -> list[WorkerModule]:
    """All modules of a worker's model that have parameters. Tied parameters appear once.

    Where vLLM wraps a module for LoRA, its weights are those of the wrapper's `base_layer`.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    fused = FUSED | dict(getattr(model, "packed_modules_mapping", None) or {})
    seen: set[int] = set()
    modules = []
    for name, module in model.named_modules():
        own = {key: value for key, value in module._parameters.items() if value is not None and id(value) not in seen}
        seen |= {id(value) for value in own.values()}
        loaded = get_layerwise_info(module).restore_metadata[0]
        shapes = {key: tuple(loaded[key].shape if key in loaded else value.shape) for key, value in own.items()}
        if shapes:
            pieces = list(_pieces(name, module, shapes, fused))
            modules.append(WorkerModule(name, module, shapes, pieces))
    return modules


def _pieces(
    name: str, module: nn.Module, shapes: dict[str, tuple[int, ...]], fused: dict[str, list[str]]
) -> Iterator[Piece]:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    if isinstance(module, RoutedExperts):
        yield from _expert_pieces(name, module, shapes)
        return
    for key, shape in shapes.items():
        yield from _parameter_pieces(name, module, key, shape, fused)


def _parameter_pieces(
    name: str, module: nn.Module, key: str, shape: tuple[int, ...], fused: dict[str, list[str]]
) -> list[Piece]:
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    plain = name.replace(".base_layer", "")
    path, _, leaf = plain.rpartition(".")
    param, hf_name = f"{name}.{key}", f"{plain}.{key}"
    rank, size = getattr(module, "tp_rank", 0), getattr(module, "tp_size", 1)
    if isinstance(module, linear.QKVParallelLinear):
        names = dict(zip("qkv", (f"{path}.{part}.{key}" for part in fused[leaf]), strict=True))
        heads = Heads(module.total_num_heads, module.total_num_kv_heads, module.head_size)
        return shards.vllm_qkv(param, names, heads, shape[1] if len(shape) == 2 else 0, rank, size)
    if isinstance(module, linear.MergedColumnParallelLinear) and leaf in fused:
        return shards.stacked_rows(param, [f"{path}.{part}.{key}" for part in fused[leaf]], shape, rank)
    if isinstance(module, linear.RowParallelLinear) and len(shape) == 2:
        return shards.columns(param, hf_name, shape, rank)
    if isinstance(module, linear.ColumnParallelLinear):
        return shards.rows(param, hf_name, shape, rank, size)
    if isinstance(module, VocabParallelEmbedding):
        rank = module.shard_indices.padded_org_vocab_start_index // shape[0]
        return shards.rows(param, hf_name, shape, rank, size, limit=module.org_vocab_size)
    return shards.whole(param, hf_name, shape)


def _expert_pieces(name: str, module: Any, shapes: dict[str, tuple[int, ...]]) -> Iterator[Piece]:
    """w13_weight [experts, gate and up, hidden] and w2_weight [experts, hidden, inner] of the worker's own experts."""
    if set(shapes) != {"w13_weight", "w2_weight"}:
        raise SyncError(f"{name} holds {sorted(shapes)}: only experts with w13_weight and w2_weight can be synced")
    prefix = name.removesuffix(".routed_experts").replace(".base_layer", "")
    parallel = module.moe_config.moe_parallel_config
    for expert in range(module.global_num_experts):
        index = expert if module.expert_map is None else module._map_global_expert_id_to_local_expert_id(expert)
        if index < 0:
            continue
        gate, up, down = (
            f"{prefix}.{expert}.{part}.weight"
            for part in (module.ckpt_gate_proj_name, module.ckpt_up_proj_name, module.ckpt_down_proj_name)
        )
        rank = parallel.tp_rank
        yield from shards.expert(
            shards.stacked_rows("", [gate, up], shapes["w13_weight"][1:], rank), f"{name}.w13_weight", index
        )
        yield from shards.expert(shards.columns("", down, shapes["w2_weight"][1:], rank), f"{name}.w2_weight", index)


def reload(module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Put whole parameters, in model form, through vLLM's layerwise reload of this module alone.

    `finalize_layerwise_reload` processes a module that has got some but not all of its elements from weight loaders.
    Our values are already this worker's shards, so they become the parameters and one element is reported as loaded
    (vLLM 0.26, model_executor/model_loader/reload; can go when it takes shards). The caller must not use them again.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import materialize_layer

    kept = {name: value.detach() for name, value in module._parameters.items() if value is not None}
    initialize_layerwise_reload(module)
    info = get_layerwise_info(module)
    materialize_layer(module, info)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        value = values.get(name, kept.get(name))
        if value is None or value.shape != parameter.shape:
            raise SyncError(f"{type(module).__name__}.{name} was not received and cannot be read back: sync it as well")
        if name in values and value.stride() == parameter.stride():
            parameter.data = value
        else:
            parameter.data.copy_(value)
    info.load_numel = 1
    finalize_layerwise_reload(module, None)


def try_direct(one: WorkerModule) -> bool:
    """Whether writing into this module's parameters is the same as reloading it. Its weights end as they were.

    Both ways get the same values and must leave the same bits in the parameters. On CPU the answer is always no:
    kernels there keep packed copies that the parameters do not show.
    """
    parameters = {name: getattr(one.module, name) for name in one.shapes}
    if not one.readable or any(parameter.device.type == "cpu" for parameter in parameters.values()):
        return False
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    # Other values than the present ones, so that a reload that changes nothing would be seen; rolled along each axis.
    probe = {name: value.roll(1, 0).roll(1, -1) for name, value in before.items()}
    reload(one.module, {name: value.clone() for name, value in probe.items()})
    same = all(
        getattr(one.module, name) is parameter and torch.equal(parameter.detach(), probe[name])
        for name, parameter in parameters.items()
    )
    for name, parameter in parameters.items():
        parameter.data.copy_(before[name])
    return same
