"""What the oracle runs on rank processes: everything that must not depend on the layout, by quantity and item."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from broken_invariants import break_invariant
from tasks import _everyones as everyones
from tasks import gradients

from rl_actors.errors import TrainingError
from rl_actors.trainer.worker import MegatronWorker
from rl_actors.types import TrainBatch

Numbers = dict[str, dict[str, Any]]
"""Quantity -> item -> array or number, as one rank knows it."""

NOISE = {"seed": 5, "scale": 0.03}
"""B starts at zero, where the gradient of A is zero as well: adapters are moved away from there first."""


def measure(worker: MegatronWorker, batch: TrainBatch, broken: str = "") -> Numbers:
    """One update of moved adapters, and all that leads to it and follows from it.

    The policy is away from the old one, so ratios differ from 1 and some are clipped. Gradients are taken before their
    norm is clipped, for a clipped gradient does not show a wrong scale.
    """
    with break_invariant(broken, worker):
        base, step_zero = everyones(worker, batch, adapters=False), everyones(worker, batch)
        worker.perturb_adapters(**NOISE)
        moved, adapted = full_adapters(worker), everyones(worker, batch)
        unclipped, metrics = update(worker, replace(batch, old_logprobs=base, ref_logprobs=base))
        merged = merged_weights(worker)
        norms = {name: metrics.pop(name) for name in list(metrics) if name.startswith("grad_norm")}
        return {
            "adapters": moved,
            "logprobs": {"adapters off": base, "step zero": step_zero, "adapters on": adapted},
            "loss": metrics,
            "gradients": {**unclipped, **norms},
            "new adapters": full_adapters(worker),
            "merged weights": merged,
            "merged logprobs": {"adapters on": everyones(worker, batch), "merged": merged_logprobs(worker, batch)},
        }


def update(worker: MegatronWorker, batch: TrainBatch) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """One optimizer step: its gradients before clipping, and its metrics."""
    unclipped: dict[str, np.ndarray] = {}
    clip = worker.optimizer.clip

    def record_and_clip(norm: float) -> None:
        unclipped.update(gradients(worker))
        clip(norm)

    worker.optimizer.clip = record_and_clip  # type: ignore[method-assign]
    try:
        metrics = worker.update(batch)
    finally:
        worker.optimizer.clip = clip  # type: ignore[method-assign]
    return unclipped, metrics


def full_adapters(worker: MegatronWorker) -> dict[str, np.ndarray]:
    """Whole A, B (and M) of this rank's adapters."""
    from rl_actors.trainer.lora import gather

    return {
        f"{adapter.name}.{part.name}": gather(part.local, part.where, adapter.group).numpy().copy()
        for adapter in worker.model.adapters
        for part in adapter.parts()
    }


def merged_weights(worker: MegatronWorker) -> dict[str, np.ndarray]:
    """Whole merged weights of this rank's adapted layers, as weight sync merges them."""
    from rl_actors.trainer.lora import gather

    return {
        adapter.weight: gather(merged, adapter.base_slice, adapter.group).numpy().copy()
        for adapter, merged in _merged(worker)
    }


def merged_logprobs(worker: MegatronWorker, batch: TrainBatch) -> np.ndarray:
    """Logprobs of a base that holds the merged weights, adapters off. The model is spoilt by it."""
    for adapter, merged in _merged(worker):
        adapter.base.data.copy_(merged)
    return everyones(worker, batch, adapters=False)


def _merged(worker: MegatronWorker) -> Any:
    from rl_actors.weight_sync.merge import Merger

    # A weight may have an adapter for each of its parts; any of them says where the weight lies.
    adapters = {adapter.weight: adapter for adapter in worker.model.adapters}
    merger = Merger(worker.model.adapters, torch.float32, scratch_numel=40_000)
    merger.gather()
    for name, merged in merger.merged(list(adapters)):
        yield adapters[name], merged


def first_step(
    worker: MegatronWorker, batch: TrainBatch, broken: str = "", cut_off: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The first step of moved adapters: its gradients, or its error. `cut_off` modules pass no gradient on."""
    with break_invariant(broken, worker):
        worker.perturb_adapters(**NOISE)
        for chunk in worker.model.chunks:
            for name, module in chunk.named_modules():
                if name.endswith(cut_off):
                    module.register_forward_hook(_without_gradient)
        before, error, unclipped = full_adapters(worker), "", {}
        try:
            unclipped, _ = update(worker, replace(batch, old_logprobs=batch.sampler_logprobs))
        except TrainingError as fault:
            error = str(fault)
        after = full_adapters(worker)
        return {
            "gradients": unclipped,
            "kinds": {adapter.name: adapter.kind for adapter in worker.model.adapters},
            "error": error,
            "unchanged": all(np.array_equal(after[name], value) for name, value in before.items()),
            "steps": worker.steps,
        }


def _without_gradient(module: Any, inputs: Any, output: Any) -> Any:
    """The same output with a gradient of exactly zero. (Without any, a pipeline's earlier stages would wait for it.)"""
    if isinstance(output, tuple):
        return tuple(None if part is None else _without_gradient(module, inputs, part) for part in output)
    return output.detach() + 0.0 * output
