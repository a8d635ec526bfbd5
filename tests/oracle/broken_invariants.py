"""Faults that a trainer could have, put into a rank on purpose, to see that the oracle notices them.

The seam is here and nowhere in the trainer: each fault patches the trainer from outside, for one measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

from rl_actors.trainer.worker import MegatronWorker


@contextmanager
def break_invariant(name: str, worker: MegatronWorker) -> Iterator[None]:
    """Within this context the rank has the fault `name` of `FAULTS`; none for an empty name."""
    if not name:
        yield
        return
    with FAULTS[name](worker):
        yield


def _gradients_are_not_reduced(worker: MegatronWorker) -> AbstractContextManager[Any]:
    """Every rank steps with the gradient of its own share of the batch."""
    return mock.patch("rl_actors.trainer.schedule.finalize_model_grads", lambda *args, **kwargs: None)


def _loss_is_divided_by_micro_batches(worker: MegatronWorker) -> AbstractContextManager[Any]:
    """Megatron's default, although the loss weights hold the whole normalisation already."""
    return mock.patch.object(worker.model.config, "calculate_per_token_loss", False)


@contextmanager
def _adapters_are_seeded_by_rank(worker: MegatronWorker) -> Iterator[None]:
    """Initial values are drawn with the rank's own seed."""
    from rl_actors.trainer.lora import initialize

    initialize(worker.model.adapters, worker.config.lora, worker.config.seed + worker.rank)
    worker.optimizer.reload()
    yield


def _merge_has_another_scale(worker: MegatronWorker) -> AbstractContextManager[Any]:
    """Merged weights are W + alpha * B A, as if alpha were not divided by the rank."""
    from rl_actors.weight_sync.merge import Merger

    right = Merger.__init__

    def wrong(self: Merger, adapters: Any, *args: Any, **kwargs: Any) -> None:
        alpha = [replace(adapter, scale=adapter.scale * worker.config.lora.rank) for adapter in adapters]
        right(self, alpha, *args, **kwargs)

    return mock.patch.object(Merger, "__init__", wrong)


@contextmanager
def _first_input_needs_no_gradient(worker: MegatronWorker, ours: bool = False) -> Iterator[None]:
    """Recompute with a frozen embedding, as Megatron has it: neither we nor Bridge make its output require grad."""
    with (
        mock.patch("megatron.bridge.peft.base.maybe_enable_recompute_inputs_grad"),
        nullcontext() if ours else mock.patch("rl_actors.trainer.model._require_grad_of_first_input"),
    ):
        worker.build()
    yield


def _bridge_does_not_help(worker: MegatronWorker) -> AbstractContextManager[None]:
    """No fault: Bridge's patch for recompute is missing and ours must do. (Bridge's depends on memory addresses.)"""
    return _first_input_needs_no_gradient(worker, ours=True)


FAULTS: dict[str, Callable[[MegatronWorker], AbstractContextManager[Any]]] = {
    "gradients are not reduced": _gradients_are_not_reduced,
    "loss is divided by micro-batches": _loss_is_divided_by_micro_batches,
    "adapters are seeded by rank": _adapters_are_seeded_by_rank,
    "merge has another scale": _merge_has_another_scale,
    "first input needs no gradient": _first_input_needs_no_gradient,
    "bridge does not help": _bridge_does_not_help,
}
