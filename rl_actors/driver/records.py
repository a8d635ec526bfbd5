"""The record of one training step, from what its stages returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rl_actors.algorithms.batching import BatchStats
from rl_actors.tracking.records import NAN, StepRecord
from rl_actors.types import TrainBatch, TrajectoryGroup
from rl_actors.weight_sync.sync import SyncReport

_NAMED = ("loss", "grad_norm", "lr", "entropy")


def step_record(
    step: int,
    groups: Sequence[TrajectoryGroup],
    stats: BatchStats,
    batch: TrainBatch | None,
    metrics: Mapping[str, float],
    sync: SyncReport,
    buffer_depth: int,
    engine: Mapping[str, float],
) -> StepRecord:
    """Numbers of step `step` (1 for the first), which was trained at version `step - 1`."""
    answers = [trajectory for group in groups for trajectory in group.trajectories]
    staleness = [step - 1 - trajectory.oldest_version for trajectory in answers]
    lengths = [len(trajectory.token_ids) for trajectory in answers]
    tis = {"mean": metrics["tis_weight"], "capped_fraction": metrics["tis_capped_fraction"]} if metrics else {}
    return StepRecord(
        step=step,
        version=sync.version,
        reward_mean=stats.reward_mean,
        reward_std=stats.reward_std,
        uniform_fraction=stats.uniform_groups / stats.groups,
        loss=metrics.get("loss", NAN),
        grad_norm=metrics.get("grad_norm", NAN),
        lr=metrics.get("lr", NAN),
        entropy=metrics.get("entropy", NAN),
        kl=metrics.get("kl_ref", NAN),
        tis=tis,
        response_length_mean=stats.response_length_mean,
        response_length_max=max(lengths),
        truncated_fraction=stats.truncated_fraction,
        staleness_mean=float(np.mean(staleness)),
        staleness_max=max(staleness),
        sync_bytes=sync.bytes,
        tokens_trained=len(batch.tokens) if batch else 0,
        buffer_depth=buffer_depth,
        engine=engine,
        extra={name: value for name, value in metrics.items() if name not in _NAMED},
    )
