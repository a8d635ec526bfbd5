"""What the checkpoint tests run on rank processes. Each takes the built worker; results are plain."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from rl_actors.trainer.worker import MegatronWorker
from rl_actors.types import TrainBatch


def train_and_save(worker: MegatronWorker, batch: TrainBatch, folder: str, updates: int) -> dict[str, Any]:
    """`updates` steps, a save, and how it goes on without a break."""
    for _ in range(updates):
        worker.update(batch)
    torch.rand(3)  # the generators are not where a fresh start leaves them
    save(worker, folder)
    return go_on(worker, batch)


def load_and_go_on(worker: MegatronWorker, batch: TrainBatch, folder: str, own_updates: int = 0) -> dict[str, Any]:
    """A load, into a worker that has made `own_updates` steps of its own, and how it goes on."""
    for _ in range(own_updates):
        worker.update(batch)
    worker.load_state(folder)
    return go_on(worker, batch)


def save(worker: MegatronWorker, folder: str) -> None:
    """A whole checkpoint, as the pool makes it."""
    worker.snapshot()
    worker.write_snapshot(folder)
    torch.distributed.barrier()
    if worker.rank == 0:
        worker.write_adapter(folder)
    torch.distributed.barrier()


def first_look(worker: MegatronWorker, batch: TrainBatch) -> dict[str, Any]:
    """Logprobs of a worker as it was built, and the loss of one update."""
    logprobs = worker.compute_logprobs(batch)
    return {"logprobs": logprobs, "loss": worker.update(batch)["loss"], "steps": worker.step_count()}


def go_on(worker: MegatronWorker, batch: TrainBatch) -> dict[str, Any]:
    """Logprobs now and after two more steps, the losses and gradient norms of these, and the generators' states."""
    out: dict[str, Any] = {
        "steps": worker.step_count(),
        "rng": _generators(),
        "logprobs": worker.compute_logprobs(batch),
    }
    metrics = [worker.update(batch) for _ in range(2)]
    out["losses"] = [one["loss"] for one in metrics]
    out["norms"] = [one["grad_norm"] for one in metrics]
    out["after"] = worker.compute_logprobs(batch)
    return out


def write_while_training(worker: MegatronWorker, batch: TrainBatch, first: str, second: str) -> None:
    """A checkpoint written before anything else happens, and the same snapshot written after two more steps."""
    worker.update(batch)
    save(worker, first)
    worker.snapshot()
    for _ in range(2):
        worker.update(batch)
    worker.write_snapshot(second)


def load_and_save(worker: MegatronWorker, folder: str, again: str) -> None:
    """A load and a save: the second checkpoint must hold what the first does."""
    worker.load_state(folder)
    save(worker, again)


def load_and_compare(worker: MegatronWorker, batch: TrainBatch, folder: str) -> tuple[float, int]:
    """(greatest difference between a parameter and its master cast to the parameter's type, parameters seen)."""
    from rl_actors.trainer.optimizer_state import holdings

    worker.load_state(folder)
    worst, seen = 0.0, 0
    for parameter, held in holdings(worker.optimizer.megatron).items():
        own = parameter.detach().reshape(-1)[held.start : held.stop]
        worst = max(worst, float((own.float() - held.main.to(own.dtype).float()).abs().max()))
        seen += 1
    return worst, seen


def _generators() -> list[int]:
    from megatron.core import tensor_parallel

    states = tensor_parallel.get_cuda_rng_tracker().get_states()
    return [zlib.crc32(state.numpy().tobytes()) for state in (torch.get_rng_state(), *states.values())]
