"""Restore a Megatron rank's training state from a checkpoint of any layout; `snapshot` writes it.

Frozen base weights are not saved. Every rank has written the runs of the fp32 masters and Adam moments that it owned,
without any gather. At load every rank reads the full tensors of its own adapters, one after the other, and takes its
part, so any layout can read any other.

Invariant: after a load, parameters are the masters cast to their type, and masters, moments and the step are those
that were saved. A checkpoint of another model or of other adapters is a CheckpointError before anything changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel

from rl_actors.config import ModelConfig
from rl_actors.errors import CheckpointError, ConfigError
from rl_actors.lora_config import LoraConfig
from rl_actors.trainer.lora import AdapterShard
from rl_actors.trainer.model import TrainerModel
from rl_actors.trainer.optimizer_state import Holding, holdings, reset
from rl_actors.trainer.peft_start import PeftFolder
from rl_actors.trainer.shard_files import ShardReader, TrainerState
from rl_actors.trainer.snapshot import overlap, rng_file

if TYPE_CHECKING:
    from rl_actors.trainer.worker import MegatronWorker

logger = logging.getLogger(__name__)

_FREE = ("dropout", "a_init", "b_init", "init_from")
"""LoRA settings that may differ at resume: they do not describe the saved tensors."""


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
            _restore(shard, reader.full, held, moments=state.steps > 0)
    worker.steps = state.steps
    _restore_rng(folder, state, model, worker.config.seed)


def start_from(worker: MegatronWorker, folder: Path) -> None:
    """Give a fresh worker the adapters of a PEFT folder (`lora.init_from`). Collective.

    Raises:
        ConfigError: they are not the run's.
    """
    source = PeftFolder(folder, worker.model.shape)
    held = holdings(worker.optimizer.megatron)
    with torch.no_grad():
        for shard in worker.model.adapters:
            (rank, width), (out, _) = (part.shape for part in shard.parts())
            a, b = source.pair(shard.name, out, width, shard.scale)
            if len(a) > rank:
                raise ConfigError(f"lora.init_from {folder} needs rank {len(a)} for {shard.name}, which has {rank}")
            if len(a) < rank:
                fresh, _ = shard.full()
                a = torch.cat([a, fresh[len(a) :].to("cpu", torch.float32)])
                b = torch.nn.functional.pad(b, (0, rank - b.shape[1]))
            _restore(shard, lambda _, part, *kind, a=a, b=b: a if part == "A" else b, held, moments=False)  # type: ignore[misc]


def _restore(shard: AdapterShard, full: Callable[..., torch.Tensor], held: dict[Any, Holding], moments: bool) -> None:
    """Write the shard from `full(name, part[, kind])`, its masters in float32, and Adam's moments if there are any."""
    for part in shard.parts():
        weight = part.where.of(full(shard.name, part.name))
        if part.base is not None:
            weight = weight - part.base.cpu()
        part.local.detach().copy_(weight)
        holding = held.get(part.parameter)
        if holding is None:
            continue
        offset, lo, hi = overlap(part, holding)
        if lo >= hi:
            continue
        run, source = slice(lo - holding.start, hi - holding.start), slice(lo - offset, hi - offset)
        holding.main[run].copy_(weight.reshape(-1)[source])
        if moments:
            for kind in ("exp_avg", "exp_avg_sq"):
                moment = part.where.of(full(shard.name, part.name, kind))
                holding.state[kind].view(-1)[run].copy_(moment.reshape(-1)[source])


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


def _restore_rng(folder: Path, state: TrainerState, model: TrainerModel, seed: int) -> None:
    path = rng_file(folder, dist.get_rank())
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
