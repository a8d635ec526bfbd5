"""Where a run's time went, from its spans: pure functions for the report, the end table and the notebook.

A stage's time is the wall time during which at least one of its spans ran, so a hundred rollouts at once count once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_actors.tracking.trace import Span, length, overlaps, union


@dataclass(frozen=True)
class StageTime:
    """One stage over all steps. Seconds per step are of the steps in which the stage ran."""

    stage: str
    pool: str
    steps: int
    total_s: float
    share: float
    """Of the run's wall time. Stages overlap, so shares add up to more than 1 when the pipeline works."""
    mean_s: float
    median_s: float
    p95_s: float
    max_s: float


def wall_seconds(spans: Sequence[Span]) -> float:
    """Time during which any stage ran; the pause between two attempts of a resumed run does not count."""
    return length((span.start_s, span.end_s) for span in spans)


def stage_times(spans: Sequence[Span]) -> list[StageTime]:
    """One row per stage and pool, the longest first."""
    wall_s = wall_seconds(spans)
    rows = []
    for stage, pool in sorted({(span.stage, span.pool) for span in spans}):
        own = [span for span in spans if (span.stage, span.pool) == (stage, pool)]
        per_step = np.array(list(step_seconds(own).values()))
        total_s = length((span.start_s, span.end_s) for span in own)
        rows.append(
            StageTime(
                stage=stage,
                pool=pool,
                steps=len(per_step),
                total_s=total_s,
                share=total_s / wall_s if wall_s else 0.0,
                mean_s=float(per_step.mean()),
                median_s=float(np.median(per_step)),
                p95_s=float(np.percentile(per_step, 95)),
                max_s=float(per_step.max()),
            )
        )
    return sorted(rows, key=lambda row: -row.total_s)


def stage_seconds(spans: Sequence[Span], stage: str) -> float:
    """Seconds during which at least one span of `stage` ran."""
    return length((span.start_s, span.end_s) for span in spans if span.stage == stage)


def step_seconds(spans: Sequence[Span]) -> dict[int, float]:
    """Covered seconds by step."""
    by_step: dict[int, list[tuple[float, float]]] = {}
    for span in spans:
        by_step.setdefault(span.step, []).append((span.start_s, span.end_s))
    return {step: length(intervals) for step, intervals in sorted(by_step.items())}


def pool_shares(spans: Sequence[Span]) -> dict[str, float]:
    """How much of the wall time each pool was at work; the driver's waits are no work."""
    wall_s = wall_seconds(spans)
    pools = sorted({span.pool for span in spans if span.pool != "driver"})
    return {pool: length((s.start_s, s.end_s) for s in spans if s.pool == pool) / wall_s for pool in pools}


@dataclass(frozen=True)
class Overlap:
    """How long `first` ran while `second` ran; `share` is of the time of the shorter of the two."""

    first: str
    second: str
    seconds: float
    share: float


def overlap_table(spans: Sequence[Span]) -> list[Overlap]:
    """Rollout against every stage of the trainer that ran: what asynchrony gained."""
    table = []
    for stage in ("reward", "logprob", "ref_logprob", "update", "sync", "checkpoint"):
        shorter = min(stage_seconds(spans, "rollout"), stage_seconds(spans, stage))
        if shorter > 0:
            seconds = overlaps(spans, "rollout", stage)
            table.append(Overlap("rollout", stage, seconds, seconds / shorter))
    return table


def idle_seconds(spans: Sequence[Span]) -> float:
    """Gaps in which no stage at all was running, between the first span and the last (a restart counts as one)."""
    covered = union((span.start_s, span.end_s) for span in spans)
    return sum(after[0] - before[1] for before, after in itertools.pairwise(covered))
