"""The driver's side of the Megatron pool: one actor per rank, each on its own bundle, all called together."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from placement.bundles import Placement
from placement.layout import MegatronLayout
from rl_actors.actor_environment import cpu_environment, gpu_environment
from rl_actors.config import RunConfig
from rl_actors.digests import Digest
from rl_actors.pool import ActorPool, ActorSpec
from rl_actors.trainer.model import Device
from rl_actors.trainer.worker import MegatronWorker
from rl_actors.types import TrainBatch


class TrainerPool:
    """All trainer ranks. Use it from one event loop.

    Every call ends within its timeout of `config.timeouts`, or with an error that names the late or dead actor.

    Args:
        config: of the run.
        placement: a granted plan with a seat for every rank; None lets Ray place the ranks.
        device: "cpu" or "gpu", already decided.
        run_name: prefix of actor names.

    Attributes:
        actors: the `ActorPool`, in rank order.
        version: optimizer steps taken, which is the weight version of the trainer.
    """

    def __init__(
        self, config: RunConfig, placement: Placement | None = None, device: Device = "cpu", run_name: str = "run"
    ) -> None:
        self.config = config
        self.layout = MegatronLayout.from_config(config.trainer)
        self.version = 0
        if placement is not None:
            names = list(placement.plan.trainer_actors)
        else:
            names = [f"trainer/rank-{rank}" for rank in range(self.layout.world_size)]
        specs = [
            ActorSpec(
                name,
                args=(rank, config, self.layout, device),
                env_vars=_environment(config, device),
                num_cpus=config.placement.cpus_per_bundle,
                num_gpus=1.0 if device == "gpu" else 0.0,
            )
            for rank, name in enumerate(names)
        ]
        self.actors = ActorPool(MegatronWorker, specs, run_name, placement)

    async def load_libraries(self) -> None:
        """Start the actors and import what they need, without touching a GPU. `start` goes on from there."""
        deadline = time.monotonic() + self.config.timeouts.start_s
        await self.actors.astart(self.config.timeouts.start_s)
        try:
            await self.actors.acall("load_libraries", timeout_s=self._left(deadline))
        except BaseException:
            await self.actors.akill()
            raise

    async def start(self) -> None:
        """Start the actors, let them meet at rank 0, and build the model.

        Raises:
            ActorLateError, ActorDiedError, PlacementError, ConfigError: nothing is left running.
        """
        deadline = time.monotonic() + self.config.timeouts.start_s
        if not self.actors.actors:
            await self.actors.astart(self.config.timeouts.start_s)
        try:
            (address,) = await self.actors.acall("free_address", timeout_s=self._left(deadline), only=[self._first])
            await self.actors.acall("start", *address, timeout_s=self._left(deadline))
        except BaseException:
            await self.actors.akill()
            raise

    async def compute_logprobs(self, batch: TrainBatch, adapters: bool = True) -> np.ndarray:
        """Log-probabilities of the sampled tokens, float32 [R] in the batch's order; without adapters, the base's."""
        answers = await self.actors.acall("compute_logprobs", batch, adapters, timeout_s=self.config.timeouts.step_s)
        return merge_logprobs(batch, answers)

    async def update(self, batch: TrainBatch) -> dict[str, float]:
        """One optimizer step; the weight version goes up by one. Metrics as in `trainer.update.update`.

        Raises:
            TrainingError: no step was made, the version stays.
        """
        answers = await self.actors.acall("update", batch, timeout_s=self.config.timeouts.step_s)
        self.version += 1
        return answers[0]  # type: ignore[no-any-return]

    async def release_memory(self) -> None:
        """Give cached GPU memory back to the device, for an engine that shares it."""
        await self.actors.acall("release_memory", timeout_s=self.config.timeouts.step_s)

    async def perturb_adapters(self, seed: int, scale: float) -> None:
        """Add seeded noise to every adapter; for checks."""
        await self.actors.acall("perturb_adapters", seed, scale, timeout_s=self.config.timeouts.step_s)

    async def snapshot(self) -> None:
        """Every rank copies its part of a checkpoint into host memory; training may go on when it returns."""
        await self.actors.acall("snapshot", timeout_s=self.config.timeouts.checkpoint_s)

    async def write(self, directory: str) -> dict[str, Digest]:
        """Every rank writes its part of the last snapshot, beside training; then rank 0 adds the PEFT folder.

        Returns:
            What each file must hold, by its path in `directory`, as its writer had the bytes in memory.
        """
        limit_s = self.config.timeouts.checkpoint_s
        written = await self.actors.acall("write_snapshot", directory, timeout_s=limit_s, control=True)
        written += await self.actors.acall(
            "write_adapter", directory, timeout_s=limit_s, only=[self._first], control=True
        )
        return {name: digest for files in written for name, digest in files.items()}

    async def save(self, directory: str) -> None:
        """Snapshot and write, and wait for both."""
        await self.snapshot()
        await self.write(directory)

    async def load(self, directory: str) -> None:
        """Every rank reads a checkpoint; `version` becomes its step count."""
        limit_s = self.config.timeouts.checkpoint_s
        await self.actors.acall("load_state", directory, timeout_s=limit_s)
        (self.version,) = await self.actors.acall("step_count", timeout_s=limit_s, only=[self._first])

    @property
    def _first(self) -> str:
        """The name of rank 0."""
        return next(iter(self.actors.specs))

    @staticmethod
    def _left(deadline: float) -> float:
        return max(0.1, deadline - time.monotonic())


def merge_logprobs(batch: TrainBatch, answers: Iterable[tuple[np.ndarray, np.ndarray] | None]) -> np.ndarray:
    """float32 [R] from what the ranks answered: (sequence indices, their response-flat values) or None.

    Raises:
        ValueError: a sequence was answered for twice or not at all.
    """
    offsets = batch.response_offsets
    merged = np.zeros(int(offsets[-1]), dtype=np.float32)
    seen = np.zeros(len(batch), dtype=np.int64)
    for indices, values in (answer for answer in answers if answer is not None):
        start = 0
        for index in indices:
            length = int(batch.response_lengths[index])
            merged[offsets[index] : offsets[index + 1]] = values[start : start + length]
            start += length
        np.add.at(seen, indices, 1)
    if not np.all(seen == 1):
        raise ValueError(f"sequences {np.flatnonzero(seen != 1).tolist()} were not answered for exactly once")
    return merged


def _environment(config: RunConfig, device: Device) -> dict[str, str]:
    if device == "gpu":
        # Megatron orders communication and compute of TP and sequence parallelism by one hardware queue.
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} | gpu_environment(config, "trainer")
    threads = config.trainer.threads_per_rank
    return {"MKL_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""} | cpu_environment(threads)
