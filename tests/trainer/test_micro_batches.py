"""The plan of micro-batches: everything once, balanced, within the budget; both forms say the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tiny_models import make_batch

from placement.model_shape import ModelShape
from rl_actors.trainer.batch import (
    Form,
    context_parallel_part,
    length_multiple,
    make_micro_batch,
    plan_micro_batches,
)

SHAPE = ModelShape(48, 2048, 32, 4, 128, 0, 768, 128, 8, 151936, False, moe_layers=48)  # Qwen3-30B-A3B


def random_lengths(rng: np.random.Generator) -> np.ndarray:
    """From none but short ones to a few long among many short: what answers are like."""
    scale = rng.choice([4.0, 60.0, 2000.0])
    return np.minimum(2 + rng.exponential(scale, rng.integers(1, 60)).astype(np.int64), 16_384)


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("cost", [float, SHAPE.forward_flops])
def test_any_lengths_give_a_whole_plan(form: Form, ranks: int, cost: Callable[[int], float]) -> None:
    rng = np.random.default_rng(ranks)
    for _ in range(50):
        lengths, multiple = random_lengths(rng), int(rng.choice([1, 2, 8]))
        budget = int(rng.integers(1, 2 * lengths.max()))
        plan = plan_micro_batches(lengths, ranks, budget, form, multiple, cost)
        assert len(plan) == ranks
        assert len({len(share) for share in plan}) == 1, "every rank gets the same number of micro-batches"
        everything = np.concatenate([indices for share in plan for indices in share])
        assert sorted(everything.tolist()) == list(range(len(lengths))), "each sequence exactly once"
        padded = -(-lengths // multiple) * multiple
        for indices in (indices for share in plan for indices in share if len(indices) > 1):
            row = len(indices) * padded[indices].max() if form == "padded" else padded[indices].sum()
            assert row <= budget
        costs = np.array([cost(int(length)) for length in padded])
        loads = [sum(costs[indices].sum() for indices in share) for share in plan]
        assert max(loads) - min(loads) <= costs.max() * (1 + 1e-9), "ranks differ by one sequence at most"


def test_ranks_share_the_square_of_attention() -> None:
    """A token of a long sequence costs more than one of a short sequence, so the rank that has it gets fewer tokens."""
    lengths = np.array([16_384] + [512] * 64)
    by_tokens, by_cost = (
        [sum(lengths[indices].sum() for indices in share) for share in plan]
        for plan in (
            plan_micro_batches(lengths, 2, 16_384, "packed"),
            plan_micro_batches(lengths, 2, 16_384, "packed", cost=SHAPE.forward_flops),
        )
    )
    assert by_tokens == [24_576, 24_576]
    assert by_cost[0] < 0.9 * by_cost[1]


def test_cost_is_twice_the_parameters_and_the_square_of_attention() -> None:
    """Qwen3-30B-A3B: 3.3B active parameters with the embedding, which takes part in no product."""
    assert SHAPE.active_parameters + 151_936 * 2048 == pytest.approx(3.35e9, rel=0.01)
    assert SHAPE.forward_flops(1) == pytest.approx(2 * SHAPE.active_parameters, rel=1e-3)
    square = SHAPE.forward_flops(20_000) - 2 * SHAPE.forward_flops(10_000)
    assert square == 48 * 32 * 128 * (20_000**2 - 2 * 10_000**2) * 2


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
