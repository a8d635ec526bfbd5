"""What one rank of the Megatron pool does. A plain class; the pool makes a Ray actor of it.

All state of training is in here: model, adapters, optimizer, step count. All ranks get the same calls in the same
order, since nearly every method is a collective. Invariant: a TrainingError is raised on all ranks or on none, and the
adapters are then as before.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from placement.layout import MegatronLayout
from rl_actors.config import RunConfig
from rl_actors.digests import Digest
from rl_actors.trainer.learning_rate import learning_rate
from rl_actors.trainer.model import Device, TrainerModel, build_model, init_distributed, prepare_process
from rl_actors.types import TrainBatch

if TYPE_CHECKING:
    from rl_actors.trainer.optimizer import AdapterOptimizer
    from rl_actors.trainer.snapshot import Snapshots
    from rl_actors.weight_sync.sender import WeightSender


class MegatronWorker:
    """One rank.

    Args:
        rank: global rank in `layout`.
        config: of the run.
        layout: all ranks.
        device: "cpu" or "gpu", already decided.

    Attributes:
        model: `TrainerModel` after `start`; weight sync reads its shards and adapters.
        steps: optimizer steps taken since the adapters' initial values.
    """

    def __init__(self, rank: int, config: RunConfig, layout: MegatronLayout, device: Device) -> None:
        self.rank = rank
        self.config = config
        self.layout = layout
        self.device: Device = device
        self.steps = 0
        self._model: TrainerModel | None = None
        self._optimizer: AdapterOptimizer | None = None
        self._sender: WeightSender | None = None
        self._snapshots: Snapshots | None = None

    @property
    def model(self) -> TrainerModel:
        if self._model is None:
            raise RuntimeError("the trainer rank was not started")
        return self._model

    @property
    def optimizer(self) -> AdapterOptimizer:
        if self._optimizer is None:
            raise RuntimeError("the trainer rank was not started")
        return self._optimizer

    def free_address(self) -> tuple[str, int]:
        """(address of this node, a free port): where rank 0 will wait for the others."""
        import ray

        address = ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"
        with socket.socket() as probe:
            probe.bind(("", 0))
            return address, int(probe.getsockname()[1])

    def load_libraries(self) -> None:
        """Import Megatron and Bridge, which takes longest; no GPU memory is used yet."""
        prepare_process(self.device, self.config.trainer.threads_per_rank)
        import megatron.bridge  # noqa: F401

        import rl_actors.trainer.lora  # noqa: F401

    def start(self, address: str, port: int) -> None:
        """Join the other ranks, load the model, put adapters in, make the optimizer. Collective.

        Raises:
            ConfigError: model, layout and LoRA do not fit together.
        """
        import torch

        prepare_process(self.device, self.config.trainer.threads_per_rank)
        if self.device == "gpu":
            # Ray shows each actor its own GPU only. Set here: the current device belongs to the calling thread.
            torch.cuda.set_device(0)
        init_distributed(self.rank, self.layout, address, port, self.device, self.config.timeouts.step_s)
        self.build()
        self.release_memory()  # what loading took; an engine beside it may need it

    def build(self) -> None:
        """Make model and optimizer in the groups that exist. Collective."""
        from rl_actors.trainer.optimizer import AdapterOptimizer

        config = self.config
        self._model = build_model(config.model, self.layout, config.trainer, config.lora, config.seed, self.device)
        self._optimizer = AdapterOptimizer(self._model, config.trainer.optimizer)
        self._snapshots = None
        self.steps = 0
        if config.lora.init_from is not None:
            from rl_actors.trainer.checkpoint import start_from

            start_from(self, Path(config.lora.init_from))

    def compute_logprobs(self, batch: TrainBatch, adapters: bool = True) -> tuple[np.ndarray, np.ndarray] | None:
        """Log-probabilities of the sampled tokens at the sampling temperature; the base model's without adapters.

        Returns:
            see `update.compute_logprobs`.
        """
        from contextlib import nullcontext

        from rl_actors.trainer.lora import adapters_off
        from rl_actors.trainer.update import compute_logprobs

        with nullcontext() if adapters else adapters_off(self.model.chunks):
            return compute_logprobs(
                self.model, batch, self.config.rollout.temperature, self.config.trainer.micro_batch_tokens
            )

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """One optimizer step; see `update.update` for metrics and errors."""
        from rl_actors.trainer.update import update

        config = self.config
        total = config.pipeline.steps * config.algorithm.updates_per_batch
        metrics = update(
            self.model,
            self.optimizer,
            batch,
            config.algorithm,
            config.rollout.temperature,
            config.trainer.micro_batch_tokens,
            lr=learning_rate(config.trainer.optimizer, self.steps, total),
            first=self.steps == 0,
        )
        self.steps += 1
        return metrics | self._gpu_memory()

    def _gpu_memory(self) -> dict[str, float]:
        """Of this rank's GPU in GiB: the rank's own peak since the last update, and what all its processes use now."""
        import torch

        if self.device == "cpu":
            return {}
        free, total = torch.cuda.mem_get_info()
        peak = torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        return {"max/trainer_peak_gib": peak / 2**30, "max/gpu_used_gib": (total - free) / 2**30}

    def release_memory(self) -> None:
        """Give the allocator's unused memory back to the device."""
        import torch

        if self.device == "gpu":
            torch.cuda.empty_cache()

    def step_count(self) -> int:
        """Optimizer steps taken."""
        return self.steps

    def perturb_adapters(self, seed: int, scale: float) -> None:
        """Add seeded noise to every adapter, the same in every layout. For checks of merging and sync."""
        from rl_actors.trainer.lora import perturb

        perturb(self.model.adapters, seed, scale)
        self.optimizer.reload()

    def weights(self, method: str, *arguments: Any) -> Any:
        """Call a method of this rank's `WeightSender`, which is made on first use."""
        if self._sender is None:
            from rl_actors.weight_sync.sender import WeightSender

            self._sender = WeightSender(self.model, self.config.sync.bucket_mib, self.config.sync.mode)
        return getattr(self._sender, method)(*arguments)

    def snapshot(self) -> None:
        """Copy this rank's part of a checkpoint into host memory; the rank may train on at once. Collective."""
        if self._snapshots is None:
            from rl_actors.trainer.snapshot import Snapshots

            self._snapshots = Snapshots(self)
        self._snapshots.take()

    def write_snapshot(self, directory: str) -> dict[str, Digest]:
        """Write the last snapshot's files into `directory`; runs beside training. Returns their digests by name."""
        if self._snapshots is None:
            raise RuntimeError("there is no snapshot to write")
        return self._snapshots.write(Path(directory))

    def write_adapter(self, directory: str) -> dict[str, Digest]:
        """On one rank, when all have written: add the PEFT folder. Returns the digests of its files by name."""
        from rl_actors.trainer.peft_adapter import write_beside

        return write_beside(Path(directory))

    def load_state(self, directory: str) -> None:
        """Read a checkpoint of any layout from `directory`. Collective."""
        from rl_actors.trainer.checkpoint import load

        load(self, Path(directory))
