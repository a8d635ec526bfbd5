"""A TrainBatch cut into micro-batches: balanced over data-parallel ranks, within a token budget, padded or packed.

Pure: every rank computes the same plan from the same lengths. Invariants: the plan covers each sequence exactly once;
every data-parallel rank gets the same number of micro-batches (experts and pipelines move in step), filled up with
empty ones where needed; no micro-batch with several sequences exceeds the budget, padding included; the costs of two
ranks differ by one sequence's at most.

`MicroBatch` hides the form. Padded rows are [b, s]; packed sequences are one row [1, T] with cumulative lengths. Either
way sequence i begins at `starts[i]` of row `rows[i]`, and `predictors` are the flat positions whose logits predict the
sampled tokens, so what comes after is the same code for both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rl_actors.types import TrainBatch

Form = Literal["padded", "packed"]


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass takes, as numpy.

    Attributes:
        indices: int64 [n], the sequences of the whole batch that are in here; empty in a filler.
        batch: those sequences, in that order.
        tokens, positions: int64 [b, s].
        rows, starts: int64 [n], where each sequence begins.
        predictors: int64 [R], flat positions in [b * s] whose logits predict each response token of `batch`.
        targets: int64 [R], those tokens.
        responses: int64 [R], their places in `batch`'s response-flat arrays (all of them, unless context parallel).
        cu_seqlens: int32 [n + 1] cumulative padded lengths of packed sequences, over all context-parallel ranks;
            None for padded rows.
    """

    indices: np.ndarray
    batch: TrainBatch
    tokens: np.ndarray
    positions: np.ndarray
    rows: np.ndarray
    starts: np.ndarray
    predictors: np.ndarray
    targets: np.ndarray
    responses: np.ndarray
    cu_seqlens: np.ndarray | None = None


def length_multiple(tp: int, cp: int) -> int:
    """What lengths are padded to: sequence parallelism cuts them over TP, context parallelism into 2 * CP chunks."""
    return tp * (2 * cp if cp > 1 else 1)


def plan_micro_batches(
    lengths: np.ndarray,
    ranks: int,
    token_budget: int,
    form: Form,
    multiple: int = 1,
    cost: Callable[[int], float] = float,
) -> list[list[np.ndarray]]:
    """Which sequences go where: `plan[data_parallel_rank][micro_batch]` is int64 indices (none in a filler).

    Args:
        lengths: int [N], prompt plus response.
        ranks: data-parallel ranks.
        token_budget: most tokens of one micro-batch, padding included; a longer sequence gets one of its own.
        multiple: lengths are padded to a multiple of this.
        cost: what a sequence of so many tokens costs, in any unit; it grows with the length.
    """
    padded = -(-np.asarray(lengths, dtype=np.int64) // multiple) * multiple
    costs = np.array([cost(int(length)) for length in padded], dtype=np.float64)
    plan = [_pack(share, padded, token_budget, form) for share in _balance(costs, ranks)]
    count = max(1, *(len(share) for share in plan))
    return [_spread(share, costs, count) for share in plan]


def _balance(costs: np.ndarray, ranks: int) -> list[list[int]]:
    """Costliest first to the rank with the least to do."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for index in np.argsort(-costs, kind="stable"):
        rank = loads.index(min(loads))
        shares[rank].append(int(index))
        loads[rank] += float(costs[index])
    return shares


def _pack(share: list[int], lengths: np.ndarray, budget: int, form: Form) -> list[list[int]]:
    """Cut a share, longest first, into micro-batches; neighbours have like lengths, so padding is small."""
    micro_batches: list[list[int]] = []
    for index in share:
        if micro_batches:
            grown = [*micro_batches[-1], index]
            tokens = len(grown) * int(lengths[grown[0]]) if form == "padded" else int(lengths[grown].sum())
            if tokens <= budget:
                micro_batches[-1] = grown
                continue
        micro_batches.append([index])
    return micro_batches


def _spread(micro_batches: list[list[int]], costs: np.ndarray, count: int) -> list[np.ndarray]:
    """Make `count` of them: halve the costliest, and add empty ones when none can be halved."""
    parts = [list(part) for part in micro_batches]
    while len(parts) < count:
        largest = max(
            (part for part in parts if len(part) > 1), key=lambda part: float(costs[part].sum()), default=None
        )
        if largest is None:
            parts.append([])
            continue
        at = parts.index(largest)
        half = len(largest) // 2
        parts[at : at + 1] = [largest[:half], largest[half:]]
    return [np.asarray(part, dtype=np.int64) for part in parts]


def make_micro_batch(batch: TrainBatch, indices: np.ndarray, form: Form, multiple: int = 1) -> MicroBatch:
    """Lay some sequences out. No indices give a filler: one dummy row that no loss looks at."""
    sub = batch.select(indices)
    if len(indices) == 0:
        return _filler(sub, indices, form, multiple)
    padded = -(-sub.lengths.astype(np.int64) // multiple) * multiple
    count = len(indices)
    if form == "padded":
        width = int(padded.max())
        shape = (count, width)
        rows, starts = np.arange(count), np.zeros(count, dtype=np.int64)
        cu_seqlens = None
    else:
        offsets = np.concatenate([[0], np.cumsum(padded)])
        width = int(offsets[-1])
        shape = (1, width)
        rows, starts = np.zeros(count, dtype=np.int64), offsets[:-1]
        cu_seqlens = offsets.astype(np.int32)

    tokens = np.zeros(shape, dtype=np.int64)
    positions = np.zeros(shape, dtype=np.int64)
    predictors, targets = [], []
    token_offsets = sub.token_offsets
    for i in range(count):
        row, start, length = int(rows[i]), int(starts[i]), int(sub.lengths[i])
        own = sub.tokens[token_offsets[i] : token_offsets[i + 1]]
        tokens[row, start : start + length] = own
        reach = width if form == "padded" else int(padded[i])
        positions[row, start : start + reach] = np.arange(reach)
        first = int(sub.prompt_lengths[i])
        predictors.append(row * width + start + np.arange(first - 1, length - 1))
        targets.append(own[first:])
    return MicroBatch(
        indices=np.asarray(indices, dtype=np.int64),
        batch=sub,
        tokens=tokens,
        positions=positions,
        rows=rows.astype(np.int64),
        starts=np.asarray(starts, dtype=np.int64),
        predictors=np.concatenate(predictors).astype(np.int64),
        targets=np.concatenate(targets).astype(np.int64),
        responses=np.arange(int(sub.response_lengths.sum())),
        cu_seqlens=cu_seqlens,
    )


def _filler(sub: TrainBatch, indices: np.ndarray, form: Form, multiple: int) -> MicroBatch:
    empty = np.zeros(0, dtype=np.int64)
    return MicroBatch(
        indices=np.asarray(indices, dtype=np.int64),
        batch=sub,
        tokens=np.zeros((1, multiple), dtype=np.int64),
        positions=np.arange(multiple, dtype=np.int64)[None],
        rows=empty,
        starts=empty,
        predictors=empty,
        targets=empty,
        responses=empty,
        cu_seqlens=np.array([0, multiple], dtype=np.int32) if form == "packed" else None,
    )


def context_parallel_part(micro_batch: MicroBatch, rank: int, size: int) -> MicroBatch:
    """This context-parallel rank's part of a packed micro-batch.

    Each sequence is cut into 2 * size chunks; rank r holds chunks r and 2 * size - 1 - r, to balance causal attention
    (Megatron's and Transformer Engine's convention). Every response token belongs to exactly one rank.
    """
    if size == 1:
        return micro_batch
    if micro_batch.cu_seqlens is None:
        raise ValueError("context parallelism needs packed sequences")
    held = []
    for start, stop in zip(micro_batch.cu_seqlens[:-1], micro_batch.cu_seqlens[1:], strict=True):
        chunks = np.arange(start, stop).reshape(2 * size, -1)
        held += [chunks[rank], chunks[2 * size - 1 - rank]]
    positions_held = np.concatenate(held)
    place = np.full(micro_batch.tokens.shape[1], -1, dtype=np.int64)
    place[positions_held] = np.arange(len(positions_held))
    mine = place[micro_batch.predictors] >= 0
    return MicroBatch(
        indices=micro_batch.indices,
        batch=micro_batch.batch,
        tokens=micro_batch.tokens[:, positions_held],
        positions=micro_batch.positions[:, positions_held],
        rows=micro_batch.rows,
        starts=micro_batch.starts,
        predictors=place[micro_batch.predictors[mine]],
        targets=micro_batch.targets[mine],
        responses=micro_batch.responses[mine],
        cu_seqlens=micro_batch.cu_seqlens,
    )
