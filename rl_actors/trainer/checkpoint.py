"""Save and restore a Megatron rank's training state, independent of the layout.

Frozen base weights are not saved. Every rank writes the runs of the fp32 masters and Adam moments that it owns, without
any gather; rank 0 then adds `trainer/state.json` and the PEFT folder `adapter/`. At load every rank reads the full
tensors of its own adapters, one after the other, and takes its part, so any layout can read any other.

Invariant: after a load, parameters are the masters cast to their type, and masters, moments and the step are those
that were saved. A checkpoint of another model or of other adapters is a CheckpointError before anything changes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from rl_actors.config import LoraConfig, ModelConfig
from rl_actors.errors import CheckpointError
from rl_actors.trainer import peft_adapter
from rl_actors.trainer.lora import AdapterPart, AdapterShard
from rl_actors.trainer.model import TrainerModel
from rl_actors.trainer.optimizer_state import MOMENTS, Holding, holdings, reset
from rl_actors.trainer.shard_files import (
    TRAINER,
    Cut,
    Kind,
    OwnedPiece,
    ShardReader,
    TrainerState,
    write_rank_file,
)

if TYPE_CHECKING:
    from rl_actors.trainer.worker import MegatronWorker

logger = logging.getLogger(__name__)

_FREE = ("dropout", "a_init", "b_init")
"""LoRA settings that may differ at resume: they do not describe the saved tensors."""


def save(worker: MegatronWorker, folder: Path) -> None:
    """Write this rank's part of the training state into `folder`. Collective over all ranks.

    `folder` is one that all ranks reach; `trainer/` and, by rank 0, `adapter/` are made in it.
    """
    (folder / TRAINER).mkdir(parents=True, exist_ok=True)
    model = worker.model
    write_rank_file(folder, worker.rank, _owned(model.adapters, holdings(worker.optimizer.megatron)))
    torch.save(_rng_states(), _rng_file(folder, worker.rank))
    adapters = {
        shard.name: {**{part.name: list(part.shape) for part in shard.parts()}, "scale": shard.scale}
        for shard in model.adapters
    }
    # Rank 0 hears of every rank only after that rank has written.
    everyone: list[Any] | None = [None] * dist.get_world_size() if worker.rank == 0 else None
    dist.gather_object(adapters, everyone)
    if everyone is None:
        return
    state = TrainerState(
        base=("random weights of " if worker.config.model.random_weights else "") + worker.config.model.path,
        dtype=worker.config.model.dtype,
        lora=worker.config.lora,
        model=model.shape,
        steps=worker.steps,
        layout=asdict(model.layout),
        adapters={name: entry for held in everyone for name, entry in held.items()},
        ranks=len(everyone),
    )
    state.write(folder)
    if reason := peft_adapter.obstacle(state):
        logger.warning("no PEFT folder beside the checkpoint: %s", reason)
    else:
        peft_adapter.write(ShardReader(folder), folder / "adapter")


def load(worker: MegatronWorker, folder: Path) -> None:
    """Restore this rank from `folder`, whatever layout wrote it.

    Learning rates follow this run's configuration at the saved step. Random generators are restored at the same layout
    and otherwise seeded from the run's seed and the step.

    Raises:
        CheckpointError: files are missing or damaged, or another model or other adapters were saved.
    """
    model, optimizer = worker.model, worker.optimizer.megatron
    reader = ShardReader(folder)
    state = reader.state
    _check(state, model, worker.config.model, worker.config.lora)
    reset(optimizer, state.steps)
    held = holdings(optimizer)
    with torch.no_grad():
        for shard in model.adapters:
            _restore(shard, reader, held)
    worker.steps = state.steps
    _restore_rng(folder, state, model, worker.config.seed)


def _owned(shards: list[AdapterShard], held: dict[Any, Holding]) -> Iterator[OwnedPiece]:
    """The pieces this rank writes: its own runs, or, of what data-parallel ranks hold alike, all of it on the first."""
    for shard in shards:
        for part in shard.parts():
            holding = held.get(part.parameter)
            if holding is None or not (holding.sharded or _is_first_replica(shard)):
                continue
            offset, lo, hi = _overlap(part, holding)
            if lo >= hi:
                continue
            run = slice(lo - holding.start, hi - holding.start)
            weight = holding.main[run]
            if part.base is not None:  # M is saved whole, so that it means the same without the base
                weight = weight + part.base.view(-1)[lo - offset : hi - offset]
            tensors: dict[Kind, torch.Tensor] = {"weight": weight}
            if all(moment in holding.state for moment in MOMENTS):
                tensors["exp_avg"] = holding.state["exp_avg"].view(-1)[run]
                tensors["exp_avg_sq"] = holding.state["exp_avg_sq"].view(-1)[run]
            where = part.where
            cut = Cut(part.shape, where.axis, where.rank, where.size, where.gated, lo - offset, hi - offset)
            yield OwnedPiece(shard.name, part.name, cut, tensors)


def _restore(shard: AdapterShard, reader: ShardReader, held: dict[Any, Holding]) -> None:
    for part in shard.parts():
        weight = part.where.of(reader.full(shard.name, part.name))
        if part.base is not None:
            weight = weight - part.base.cpu()
        part.local.detach().copy_(weight)
        holding = held.get(part.parameter)
        if holding is None:
            continue
        offset, lo, hi = _overlap(part, holding)
        if lo >= hi:
            continue
        run, source = slice(lo - holding.start, hi - holding.start), slice(lo - offset, hi - offset)
        holding.main[run].copy_(weight.reshape(-1)[source])
        if reader.state.steps:
            for kind in ("exp_avg", "exp_avg_sq"):
                moment = part.where.of(reader.full(shard.name, part.name, kind))  # type: ignore[arg-type]
                holding.state[kind].view(-1)[run].copy_(moment.reshape(-1)[source])


def _overlap(part: AdapterPart, holding: Holding) -> tuple[int, int, int]:
    """(offset, lo, hi): where the shard begins in its flat parameter, and which elements of it the rank holds there."""
    offset = int(part.local.storage_offset() - part.parameter.storage_offset())
    return offset, max(offset, holding.start), min(offset + part.local.numel(), holding.stop)


def _is_first_replica(shard: AdapterShard) -> bool:
    if shard.expert is not None:
        return bool(parallel_state.get_expert_data_parallel_rank() == 0)
    return bool(parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0)


def _check(state: TrainerState, model: TrainerModel, config: ModelConfig, lora: LoraConfig) -> None:
    """Name everything by which the checkpoint differs from this run."""
    saved, wanted = state.lora.model_dump(exclude=set(_FREE)), lora.model_dump(exclude=set(_FREE))
    for settings in (saved, wanted):
        settings["targets"], settings["exclude"] = sorted(settings["targets"]), sorted(settings["exclude"])
    faults = [
        f"lora.{key} is {saved[key]!r} in the checkpoint and {wanted[key]!r} in this run"
        for key in wanted
        if saved[key] != wanted[key]
    ]
    sizes, own = asdict(state.model), asdict(model.shape)
    faults += [
        f"the model has {key} = {sizes[key]} in the checkpoint and {own[key]} in this run"
        for key in own
        if sizes[key] != own[key]
    ]
    if lora.share_expert_adapters and state.layout["ep"] != model.layout.ep:
        faults.append(
            f"lora.share_expert_adapters ties adapters to trainer.ep, which is {state.layout['ep']} in the checkpoint "
            f"and {model.layout.ep} in this run"
        )
    if not faults:
        faults = list(_shape_faults(state, model.adapters))
    if faults:
        raise CheckpointError("the checkpoint does not fit this run: " + "; ".join(faults))
    if state.dtype != config.dtype:
        logger.warning("the checkpoint was trained in %s, this run goes on in %s", state.dtype, config.dtype)


def _shape_faults(state: TrainerState, shards: list[AdapterShard]) -> Iterator[str]:
    for shard in shards:
        entry = state.adapters.get(shard.name)
        if entry is None:
            yield f"it has no adapter {shard.name}"
            continue
        for part in shard.parts():
            if tuple(entry[part.name]) != part.shape:
                yield (
                    f"{part.name} of {shard.name} is {entry[part.name]} in the checkpoint and {list(part.shape)} "
                    "in this run"
                )


def _rng_file(folder: Path, rank: int) -> Path:
    return folder / TRAINER / f"rng-rank-{rank:05d}.pt"


def _rng_states() -> dict[str, Any]:
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    states = {"cpu": torch.get_rng_state(), "tracker": {name: state.cpu() for name, state in tracker.items()}}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_rng(folder: Path, state: TrainerState, model: TrainerModel, seed: int) -> None:
    path = _rng_file(folder, dist.get_rank())
    if state.layout == asdict(model.layout) and path.is_file():
        states = torch.load(path, weights_only=True, map_location="cpu")
        torch.set_rng_state(states["cpu"])
        tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
        return
    if dist.get_rank() == 0:
        logger.warning("random generators are seeded anew: the checkpoint was written at layout %s", state.layout)
    torch.manual_seed(seed + state.steps)
    tensor_parallel.model_parallel_cuda_manual_seed(seed + state.steps)
