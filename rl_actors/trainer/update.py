"""One optimizer step on a TrainBatch, and log-probabilities of one.

Invariants: the gradient is d(sum of loss_weights * token loss over the whole batch), whatever the micro-batches and
ranks; metrics are the same dictionary on every rank; nothing is stepped when a loss or gradient is not usable.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rl_actors.algorithms.losses import policy_loss
from rl_actors.config import AlgorithmConfig
from rl_actors.errors import TrainingError
from rl_actors.trainer.batch import MicroBatch
from rl_actors.trainer.model import TrainerModel
from rl_actors.trainer.optimizer import AdapterOptimizer
from rl_actors.trainer.schedule import Outcome, Score, local_micro_batches, run_micro_batches
from rl_actors.types import TrainBatch

_SQUARES = "squares/"


def compute_logprobs(
    model: TrainerModel, batch: TrainBatch, temperature: float, token_budget: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Log-probabilities of the sampled tokens under the weights as they are.

    Returns:
        (indices int64 [n], logprobs float32): sequences of `batch` that this rank answers for, and their response-flat
        values in that order; None on ranks that answer for none. Every sequence is answered for exactly once.
    """

    def score(micro_batch: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, Outcome]:
        values = torch.zeros(int(micro_batch.batch.response_lengths.sum()), device=logprobs.device)
        values[torch.from_numpy(micro_batch.responses).to(logprobs.device)] = logprobs.detach()
        return logprobs.sum(), {"indices": micro_batch.indices, "values": values}

    micro_batches = local_micro_batches(model, batch, token_budget)
    outcomes = run_micro_batches(model, micro_batches, score, temperature, train=False)
    if model.layout.cp > 1 and parallel_state.is_pipeline_last_stage():
        outcomes = _over_context_parallel(micro_batches, outcomes, model.torch_device)
    if not outcomes or not _answers():
        return None
    indices = np.concatenate([outcome["indices"] for outcome in outcomes])
    return indices, torch.cat([outcome["values"] for outcome in outcomes]).cpu().numpy()


def _over_context_parallel(
    micro_batches: list[MicroBatch], outcomes: list[Outcome], device: torch.device
) -> list[Outcome]:
    """Add up what the context-parallel ranks hold of each micro-batch; one may hold none of its response tokens."""
    found = {tuple(outcome["indices"]): outcome["values"] for outcome in outcomes}
    summed = []
    for micro_batch in micro_batches:
        if len(micro_batch.indices) == 0:
            continue
        zeros = torch.zeros(int(micro_batch.batch.response_lengths.sum()), device=device)
        values = found.get(tuple(micro_batch.indices), zeros)
        dist.all_reduce(values, group=parallel_state.get_context_parallel_group())
        summed.append({"indices": micro_batch.indices, "values": values})
    return summed


def _answers() -> bool:
    """Whether this rank speaks for its copies: ranks of one tensor or context parallel group know the same."""
    return (
        parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )


def update(
    model: TrainerModel,
    optimizer: AdapterOptimizer,
    batch: TrainBatch,
    algorithm: AlgorithmConfig,
    temperature: float,
    token_budget: int,
    lr: float,
    first: bool,
) -> dict[str, float]:
    """One optimizer step.

    Args:
        batch: with old_logprobs, and ref_logprobs if the algorithm has a KL term.
        lr: learning rate of this step.
        first: no step was made since the adapters were at their initial values.

    Returns:
        loss, entropy (weighted like the loss, nats), lr, grad_norm before clipping, "grad_norm/<layer type>", and the
        algorithm's metrics; the same on every rank.

    Raises:
        TrainingError: a loss or gradient is not finite, or an adapted layer type has no gradient. No step was made.
    """
    if batch.old_logprobs is None:
        raise ValueError("update needs old_logprobs: compute_logprobs gives them")
    optimizer.zero_grad()
    micro_batches = local_micro_batches(model, batch, token_budget)
    outcomes = run_micro_batches(model, micro_batches, _policy_score(algorithm), temperature, train=True)
    totals = _everywhere(outcomes, optimizer.gradient_squares())
    try:
        metrics = _checked(totals, batch, first)
    except TrainingError:
        optimizer.zero_grad()
        raise
    optimizer.clip(metrics["grad_norm"])
    optimizer.step(lr)
    return {**metrics, "lr": lr}


def _policy_score(algorithm: AlgorithmConfig) -> Score:
    def score(micro_batch: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, Outcome]:
        def own(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values[micro_batch.responses])).to(logprobs.device)

        batch = micro_batch.batch
        weights = own(batch.loss_weights)
        assert batch.old_logprobs is not None  # `update` has looked
        loss, metrics = policy_loss(
            logprobs,
            own(batch.old_logprobs),
            own(batch.sampler_logprobs),
            own(batch.advantages),
            weights,
            None if batch.ref_logprobs is None else own(batch.ref_logprobs),
            algorithm,
        )
        kept = {name: _detached(value) for name, value in metrics.items()}
        return loss, {**kept, "loss": loss.detach().clone(), "entropy": (entropy * weights).sum()}

    return score


def _detached(value: Any) -> Any:
    return value.detach() if torch.is_tensor(value) else value


def _everywhere(outcomes: list[Outcome], squares: dict[str, float]) -> dict[str, float]:
    """Combine metrics of micro-batches and ranks: sums, and maxima for names with "max/"."""
    mine = {_SQUARES + kind: value for kind, value in squares.items()}
    speaks = parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
    for outcome in outcomes if speaks else ():
        _combine(mine, {name: float(value) for name, value in outcome.items()})
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    totals: dict[str, float] = {}
    for other in everyone:
        _combine(totals, other)
    return totals


def _combine(totals: dict[str, float], other: dict[str, float]) -> None:
    for name, value in other.items():
        if name.startswith("max/"):
            totals[name] = max(totals.get(name, -math.inf), value)
        else:
            totals[name] = totals.get(name, 0.0) + value


def _checked(totals: dict[str, float], batch: TrainBatch, first: bool) -> dict[str, float]:
    squares = {name.removeprefix(_SQUARES): value for name, value in totals.items() if name.startswith(_SQUARES)}
    metrics = {name: value for name, value in totals.items() if not name.startswith(_SQUARES)}
    if not math.isfinite(metrics["loss"]):
        raise TrainingError(f"the loss is {metrics['loss']}: no step was made; look at the batch's log-probabilities")
    if bad := [kind for kind, value in squares.items() if not math.isfinite(value)]:
        raise TrainingError(f"gradients of {', '.join(sorted(bad))} are not finite: no step was made; lower the lr")
    zero = sorted(kind for kind, value in squares.items() if value == 0.0)
    # A whole batch may rightly have no gradient (no advantages, or every token clipped); some layers alone may not.
    has_signal = bool(np.any(batch.advantages * batch.loss_weights))
    if zero and (len(zero) < len(squares) or (first and has_signal)):
        raise TrainingError(
            f"adapted layers {', '.join(zero)} have zero gradient: they are cut off from the loss; no step was made"
        )
    metrics["grad_norm"] = math.sqrt(sum(squares.values()))
    metrics |= {f"grad_norm/{kind}": math.sqrt(value) for kind, value in sorted(squares.items())}
    return metrics
