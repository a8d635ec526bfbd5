"""The plan of micro-batches: everything once, balanced, within the budget; both forms say the same."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_models import make_batch

from rl_actors.trainer.batch import (
    context_parallel_part,
    length_multiple,
    make_micro_batch,
    plan_micro_batches,
)


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("sequences", [1, 2, 7, 40])
def test_plan(form: str, ranks: int, sequences: int) -> None:
    lengths = np.random.default_rng(sequences).integers(2, 50, sequences)
    budget, multiple = 96, 4
    plan = plan_micro_batches(lengths, ranks, budget, form, multiple)  # type: ignore[arg-type]
    assert len(plan) == ranks
    assert len({len(share) for share in plan}) == 1, "every rank gets the same number of micro-batches"
    everything = np.concatenate([indices for share in plan for indices in share])
    assert sorted(everything.tolist()) == list(range(sequences)), "each sequence exactly once"
    for indices in (indices for share in plan for indices in share if len(indices) > 1):
        padded = -(-lengths[indices] // multiple) * multiple
        assert (len(indices) * padded.max() if form == "padded" else padded.sum()) <= budget


def test_ranks_get_like_numbers_of_tokens() -> None:
    lengths = np.random.default_rng(0).integers(10, 200, 64)
    loads = [
        sum(lengths[indices].sum() for indices in share) for share in plan_micro_batches(lengths, 4, 512, "packed")
    ]
    assert max(loads) - min(loads) <= 200


def test_a_sequence_beyond_the_budget_stands_alone() -> None:
    (share,) = plan_micro_batches(np.array([500, 10, 10]), 1, 64, "padded")
    assert sorted(map(len, share)) == [1, 2]


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_predictors_stand_before_their_targets(form: str) -> None:
    batch = make_batch(5)
    indices = np.array([3, 0, 4])
    micro_batch = make_micro_batch(batch, indices, form, multiple=4)  # type: ignore[arg-type]
    flat = micro_batch.tokens.reshape(-1)
    np.testing.assert_array_equal(flat[micro_batch.predictors + 1], micro_batch.targets)
    expected = []
    for place, index in enumerate(indices):
        own = batch.tokens[batch.token_offsets[index] : batch.token_offsets[index + 1]]
        row, start = micro_batch.rows[place], micro_batch.starts[place]
        np.testing.assert_array_equal(micro_batch.tokens[row, start : start + len(own)], own)
        np.testing.assert_array_equal(micro_batch.positions[row, start : start + len(own)], np.arange(len(own)))
        expected.append(own[batch.prompt_lengths[index] :])
    np.testing.assert_array_equal(micro_batch.targets, np.concatenate(expected))
    assert micro_batch.tokens.shape[1] % 4 == 0


def test_context_parallel_ranks_share_all_tokens() -> None:
    batch = make_batch(4)
    whole = make_micro_batch(batch, np.arange(4), "packed", length_multiple(tp=2, cp=2))
    parts = [context_parallel_part(whole, rank, 2) for rank in (0, 1)]
    assert sum(part.tokens.shape[1] for part in parts) == whole.tokens.shape[1]
    assert {part.tokens.shape for part in parts} == {parts[0].tokens.shape}, "the ranks hold the same number"
    responses = np.concatenate([part.responses for part in parts])
    assert sorted(responses.tolist()) == whole.responses.tolist()
    for part in parts:
        np.testing.assert_array_equal(part.targets, whole.targets[part.responses])
        # The position in the sequence of a predictor is the same before and after the cut.
        before = whole.positions[0, whole.predictors[part.responses]]
        np.testing.assert_array_equal(part.positions[0, part.predictors], before)
        np.testing.assert_array_equal(
            part.tokens[0, part.predictors], whole.tokens[0, whole.predictors[part.responses]]
        )
