"""What an update must survive or refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tasks
from rank_process import RankProcesses, with_layout
from tiny_models import make_batch

BATCH = make_batch(8)


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "pp": 2}, {"replicas": 2}])
def test_a_loss_that_is_not_finite_makes_no_step(
    rank_processes: RankProcesses, tiny_config: Any, layout: dict[str, int]
) -> None:
    for answer in rank_processes.run(tasks.survive_bad_batch, with_layout(tiny_config("dense"), **layout), BATCH):
        assert "the loss is nan" in answer["error"]
        np.testing.assert_array_equal(answer["after"], answer["before"])
        assert answer["steps"] == 0
        assert np.isfinite(answer["loss"])


def test_a_batch_without_advantages_is_no_error(rank_processes: RankProcesses, tiny_config: Any) -> None:
    metrics = rank_processes.run(tasks.train_without_signal, tiny_config("dense"), BATCH)[0]
    assert metrics["grad_norm"] == 0.0


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_more_ranks_than_sequences(rank_processes: RankProcesses, tiny_config: Any, model: str) -> None:
    """Ranks without a sequence take part with fillers."""
    batch = make_batch(1)
    one = rank_processes.run(tasks.train_once, tiny_config(model), batch)[0]["metrics"]
    two = rank_processes.run(tasks.train_once, with_layout(tiny_config(model), replicas=2, pp=2), batch)[3]["metrics"]
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5, abs=1e-7)


def test_micro_batches_do_not_change_the_update(rank_processes: RankProcesses, tiny_config: Any) -> None:
    whole, pieces = (
        rank_processes.run(tasks.train_once, with_layout(tiny_config("moe"), micro_batch_tokens=budget), BATCH)[0]
        for budget in (10_000, 1)
    )
    for name, gradient in whole["gradients"].items():
        assert np.linalg.norm(pieces["gradients"][name] - gradient) <= 1e-5 * np.linalg.norm(gradient), name


def test_bfloat16_has_float32_masters(rank_processes: RankProcesses, tiny_config: Any) -> None:
    config = tiny_config("moe", model={"dtype": "bfloat16"})
    answer = rank_processes.run(tasks.train_once, with_layout(config, ep=2), BATCH)[0]
    np.testing.assert_array_equal(answer["logprobs"], answer["base"])
    assert answer["metrics"]["grad_norm"] > 0
