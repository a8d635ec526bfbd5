"""A rank's training state, taken into host memory within the step and written to disk beside the next ones.

`take` copies the fp32 masters and Adam moments that this rank owns (and the random generators) and is all that training
waits for. `write` needs nothing but that copy, so it runs in another thread while the rank trains on. Host memory holds
one copy, which the next `take` reuses; on GPU it is page-locked.

Invariant: what is written is the state at `take`, whatever happened since; a copy is never overwritten before it was
written or given up.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from rl_actors.digests import Digest, write_bytes
from rl_actors.trainer.lora import AdapterPart, AdapterShard
from rl_actors.trainer.optimizer_state import MOMENTS, Holding, holdings
from rl_actors.trainer.shard_files import (
    STATE,
    TRAINER,
    Cut,
    Kind,
    OwnedPiece,
    TrainerState,
    rank_file,
    write_rank_file,
)

if TYPE_CHECKING:
    from rl_actors.trainer.worker import MegatronWorker


@dataclass(frozen=True)
class _Taken:
    held: dict[Any, Holding]
    """By parameter, in host memory."""
    generators: bytes
    state: TrainerState | None
    """On rank 0."""


class Snapshots:
    """Takes and writes the snapshots of one rank, one at a time. Making it is collective over all ranks."""

    def __init__(self, worker: MegatronWorker) -> None:
        self._worker = worker
        self._buffers: dict[tuple[Any, str], torch.Tensor] = {}
        self._taken: _Taken | None = None
        self._writing = False
        adapters = {
            shard.name: {**{part.name: list(part.shape) for part in shard.parts()}, "scale": shard.scale}
            for shard in worker.model.adapters
        }
        self._everyones: list[Any] | None = [None] * dist.get_world_size() if worker.rank == 0 else None
        dist.gather_object(adapters, self._everyones)

    def take(self) -> None:
        """Copy this rank's part of the training state into host memory.

        Raises:
            RuntimeError: the last copy is still being written.
        """
        if self._writing:
            raise RuntimeError("the last snapshot is still being written")
        worker = self._worker
        held = holdings(worker.optimizer.megatron)
        owned = {
            part.parameter: holding
            for shard in worker.model.adapters
            for part in shard.parts()
            if (holding := held.get(part.parameter)) and (holding.sharded or _is_first_replica(shard))
        }
        copies = {parameter: self._on_host(parameter, holding) for parameter, holding in owned.items()}
        if worker.device == "gpu":
            torch.cuda.current_stream().synchronize()
        self._taken = _Taken(copies, _generators(), self._state())

    def write(self, folder: Path) -> dict[str, Digest]:
        """Write what was taken below `folder`, which all ranks reach; returns the digest of each file by relative path.

        Raises:
            RuntimeError: nothing was taken.
            OSError: of the disk.
        """
        if self._taken is None:
            raise RuntimeError("there is no snapshot to write: `take` comes first")
        taken, self._taken, self._writing = self._taken, None, True
        try:
            return self._write(taken, folder)
        finally:
            self._writing = False

    def _write(self, taken: _Taken, folder: Path) -> dict[str, Digest]:
        rank = self._worker.rank
        (folder / TRAINER).mkdir(parents=True, exist_ok=True)
        tensors, generators = rank_file(folder, rank), rng_file(folder, rank)
        files = {
            tensors: write_rank_file(folder, rank, _owned(self._worker.model.adapters, taken.held)),
            generators: write_bytes(generators, taken.generators),
        }
        if taken.state is not None:
            files[folder / TRAINER / STATE] = taken.state.write(folder)
        return {str(path.relative_to(folder)): digest for path, digest in files.items()}

    def _state(self) -> TrainerState | None:
        if self._everyones is None:
            return None
        worker = self._worker
        return TrainerState(
            base=("random weights of " if worker.config.model.random_weights else "") + worker.config.model.path,
            dtype=worker.config.model.dtype,
            lora=worker.config.lora,
            model=worker.model.shape,
            steps=worker.steps,
            layout=asdict(worker.model.layout),
            adapters={name: entry for held in self._everyones for name, entry in held.items()},
            ranks=len(self._everyones),
        )

    def _on_host(self, parameter: Any, holding: Holding) -> Holding:
        moments = {kind: holding.state[kind] for kind in MOMENTS if kind in holding.state}
        return replace(
            holding,
            main=self._copy(parameter, "weight", holding.main),
            state={kind: self._copy(parameter, kind, moment.view(-1)) for kind, moment in moments.items()},
        )

    def _copy(self, parameter: Any, kind: str, source: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get((parameter, kind))
        if buffer is None:
            pinned = self._worker.device == "gpu"
            buffer = torch.empty(source.shape, dtype=torch.float32, device="cpu", pin_memory=pinned)
            self._buffers[parameter, kind] = buffer
        return buffer.copy_(source.detach(), non_blocking=True)


def overlap(part: AdapterPart, holding: Holding) -> tuple[int, int, int]:
    """(offset, lo, hi): where the shard begins in its flat parameter, and which elements of it the rank holds there."""
    offset = int(part.local.storage_offset() - part.parameter.storage_offset())
    return offset, max(offset, holding.start), min(offset + part.local.numel(), holding.stop)


def rng_file(folder: Path, rank: int) -> Path:
    return folder / TRAINER / f"rng-rank-{rank:05d}.pt"


def _owned(shards: list[AdapterShard], held: dict[Any, Holding]) -> Iterator[OwnedPiece]:
    """The pieces this rank writes."""
    for shard in shards:
        for part in shard.parts():
            if (holding := held.get(part.parameter)) is None:
                continue
            offset, lo, hi = overlap(part, holding)
            if lo >= hi:
                continue
            run = slice(lo - holding.start, hi - holding.start)
            weight = holding.main[run]
            if part.base is not None:  # M is saved whole, so that it means the same without the base
                weight = weight + part.base.view(-1)[lo - offset : hi - offset].cpu()
            tensors: dict[Kind, torch.Tensor] = {"weight": weight}
            if all(moment in holding.state for moment in MOMENTS):
                tensors |= {"exp_avg": holding.state["exp_avg"][run], "exp_avg_sq": holding.state["exp_avg_sq"][run]}
            where = part.where
            cut = Cut(part.shape, where.axis, where.rank, where.size, where.gated, lo - offset, hi - offset)
            yield OwnedPiece(shard.name, part.name, cut, tensors)


def _is_first_replica(shard: AdapterShard) -> bool:
    """Of what data-parallel ranks hold alike, the first one owns all."""
    if shard.expert is not None:
        return bool(parallel_state.get_expert_data_parallel_rank() == 0)
    return bool(parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0)


def _generators() -> bytes:
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    states = {"cpu": torch.get_rng_state(), "tracker": {name: state.cpu() for name, state in tracker.items()}}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    file = io.BytesIO()
    torch.save(states, file)
    return file.getvalue()
