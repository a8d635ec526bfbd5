"""The study of bfloat16 rounding measures what it says."""

from __future__ import annotations

from pathlib import Path

import torch

from jobs.bench.rounding import SIZES, nearest, rounding_rows, stochastic


def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average() -> None:
    torch.manual_seed(0)
    values = torch.randn(500) * 0.02
    rounded = stochastic(values.repeat(4000, 1))
    assert torch.equal(rounded, rounded.bfloat16().float())
    gap = 2.0 ** (values.abs().log2().floor() - 7)
    assert ((rounded - values).abs() < gap).all()
    # Standard error: at most gap / 2 / sqrt(4000); six of them.
    assert ((rounded.mean(0) - values).abs() < 0.05 * gap).all()
    exact = nearest(values)
    assert torch.equal(stochastic(exact), exact)


def test_a_small_update_is_lost_to_nearest_and_drowned_by_stochastic_rounding(tiny_dense: Path) -> None:
    rows = {(row.b_size, row.rounding): row for row in rounding_rows(tiny_dense, rank=8, scale=2.0, seed=0)}
    assert len(rows) == 2 * len(SIZES)
    smallest, largest = SIZES[0], SIZES[-1]
    assert rows[smallest, "nearest"].survives < 0.5 < 0.99 < rows[largest, "nearest"].survives
    assert abs(rows[smallest, "stochastic"].survives - 1) < 0.1
    assert rows[smallest, "stochastic"].error > rows[smallest, "nearest"].error
    assert rows[largest, "nearest"].error < 0.1 and rows[largest, "nearest"].kl < rows[largest, "nearest"].kl_of_update
