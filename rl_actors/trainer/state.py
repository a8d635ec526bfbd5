"""The trainer's state as full tensors by global name: what a checkpoint holds, free of the layout it was made in.

Keys are `<adapter name>.<A|B>.<weight|exp_avg|exp_avg_sq>`, values float32 on CPU; `weight` is the optimizer's float32
master. Invariants: over all ranks every key is exported exactly once; importing the union at any layout gives the same
adapters and optimizer state.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.core import parallel_state
from torch import nn

from rl_actors.errors import CheckpointError
from rl_actors.trainer.lora import AdapterShard, Slice, gather
from rl_actors.trainer.model import TrainerModel
from rl_actors.trainer.optimizer import AdamState, AdapterOptimizer

_MOMENTS = ("exp_avg", "exp_avg_sq")


def export_state(model: TrainerModel, optimizer: AdapterOptimizer) -> tuple[dict[str, torch.Tensor], int]:
    """(the full tensors that this rank writes, optimizer steps taken). Collective.

    Before the first step there are no moments, only weights.
    """
    out: dict[str, torch.Tensor] = {}
    states: dict[nn.Parameter, AdamState | None] = {}
    steps = 0
    for adapter in model.adapters:
        for part, parameter, shard, where in _parts(adapter):
            if parameter not in states:
                states[parameter] = optimizer.read_state(parameter)
            state = states[parameter]
            tensors = {"weight": shard.detach().float()}
            if state is not None:
                steps = max(steps, state.steps)
                tensors = {
                    "weight": adapter.of_parameter(state.master),
                    "exp_avg": adapter.of_parameter(state.exp_avg),
                    "exp_avg_sq": adapter.of_parameter(state.exp_avg_sq),
                }
            for name, tensor in tensors.items():
                full = gather(tensor, where, adapter.group)
                if _writes(adapter):
                    out[f"{adapter.name}.{part}.{name}"] = full.cpu().clone()
    return out, steps


def import_state(
    model: TrainerModel, optimizer: AdapterOptimizer, tensors: Mapping[str, torch.Tensor], steps: int
) -> None:
    """Put back what `export_state` gave on all ranks together.

    Raises:
        CheckpointError: a tensor is missing or has another shape: the checkpoint is of another model or LoRA.
    """
    masters: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
    names = ("weight", *_MOMENTS) if steps else ("weight",)
    for adapter in model.adapters:
        for part, parameter, shard, where in _parts(adapter):
            whole = masters.setdefault(
                parameter, {name: torch.zeros_like(parameter, dtype=torch.float32) for name in names}
            )
            for name in names:
                key = f"{adapter.name}.{part}.{name}"
                if key not in tensors:
                    raise CheckpointError(f"the checkpoint has no {key}: it is of another model or other LoRA targets")
                own = where.of(tensors[key])
                if own.shape != shard.shape:
                    raise CheckpointError(
                        f"{key} is {tuple(tensors[key].shape)} in the checkpoint: it does not fit this model and LoRA"
                    )
                adapter.of_parameter(whole[name]).copy_(own)
    with torch.no_grad():
        for parameter, whole in masters.items():
            parameter.copy_(whole["weight"].to(parameter.dtype))
    optimizer.reload()
    if steps:
        for parameter, whole in masters.items():
            moments = (whole["exp_avg"], whole["exp_avg_sq"])
            optimizer.write_state(parameter, AdamState(*moments, master=whole["weight"], steps=steps))


def _parts(adapter: AdapterShard) -> tuple[tuple[str, nn.Parameter, torch.Tensor, Slice], ...]:
    return (
        ("A", adapter.a_parameter, adapter.a, adapter.a_slice),
        ("B", adapter.b_parameter, adapter.b, adapter.b_slice),
    )


def _writes(adapter: AdapterShard) -> bool:
    """One of the ranks that hold the same adapter writes it."""
    if adapter.expert is None:
        copies = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    else:
        copies = parallel_state.get_expert_data_parallel_rank()
    return bool(copies == 0 and adapter.group.rank() == 0)
