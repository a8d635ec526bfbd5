"""What an update must survive or refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import tasks
from rank_process import RankProcesses, with_layout
from tiny_models import make_batch

from placement.layout import MegatronLayout
from placement.memory import adapter_parameters
from placement.model_shape import ModelShape
from rl_actors.algorithms.losses import loss_weights
from rl_actors.config import AlgorithmConfig

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


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_cuts_do_not_change_the_update(rank_processes: RankProcesses, tiny_config: Any, model: str) -> None:
    """Loss, metrics, gradients: one micro-batch, several, one for each sequence; two orders; one and two ranks."""
    config = tiny_config(model, trainer={"optimizer": {"clip_grad": 0.0}})
    batches = {
        reduction: replace(BATCH, loss_weights=loss_weights(BATCH.response_lengths, reduction))
        for reduction in get_args(AlgorithmConfig.model_fields["loss_reduction"].annotation)
    }
    one, two = (
        rank_processes.run(tasks.cut_in_many_ways, with_layout(config, replicas=replicas), batches, [10_000, 40, 1])[0]
        for replicas in (1, 2)
    )
    for reduction in batches:
        expected, *others = one[reduction] + two[reduction]
        assert expected["metrics"]["clip_fraction"] > 0.05
        whole = np.concatenate([gradient.ravel() for gradient in expected["gradients"].values()])
        for found in others:
            differences = [found["gradients"][name] - gradient for name, gradient in expected["gradients"].items()]
            difference = np.linalg.norm(np.concatenate([part.ravel() for part in differences]))
            # The sums of float32 have another order; about 1e-6 is what that makes.
            assert difference <= 3e-6 * np.linalg.norm(whole)
            for name, part in zip(expected["gradients"], differences, strict=True):
                assert np.linalg.norm(part) <= 1e-5 * np.linalg.norm(expected["gradients"][name]), name
            for name, value in expected["metrics"].items():
                close = 1e-6 if name == "loss" else 5e-6
                assert found["metrics"][name] == pytest.approx(value, rel=close, abs=1e-7), name
    first, second = (one[reduction][0]["metrics"]["loss"] for reduction in batches)
    assert abs(first - second) > 1e-3, "the reductions are different losses"


def test_bfloat16_has_float32_masters(rank_processes: RankProcesses, tiny_config: Any) -> None:
    config = tiny_config("moe", model={"dtype": "bfloat16"})
    answer = rank_processes.run(tasks.train_once, with_layout(config, ep=2), BATCH)[0]
    np.testing.assert_array_equal(answer["logprobs"], answer["base"])
    assert answer["metrics"]["grad_norm"] > 0


@pytest.mark.parametrize(
    ("model", "dtype", "layout"),
    [
        ("dense", "float32", {}),
        ("moe", "bfloat16", {}),
        ("dense", "bfloat16", {"replicas": 2}),
        ("moe", "float32", {"ep": 2}),
        ("moe", "bfloat16", {"ep": 2, "replicas": 2}),
    ],
)
def test_only_adapters_take_optimizer_memory(
    rank_processes: RankProcesses, tiny_config: Any, model: str, dtype: str, layout: dict[str, int]
) -> None:
    """Two moments and, in bfloat16, a master in float32 for each adapter value, once over data-parallel ranks.

    `placement.memory` counts the same.
    """
    config = with_layout(tiny_config(model, model={"dtype": dtype}), **layout)
    answers = rank_processes.run(tasks.optimizer_bytes, config, BATCH)
    ranks = MegatronLayout.from_config(config.trainer)
    shape = ModelShape.from_folder(config.model.path)
    dense, experts = adapter_parameters(shape, ranks, config.lora)
    masters = 4 if dtype == "bfloat16" else 0
    assert sum(answer["moments"] for answer in answers) == 8 * (dense + experts * ranks.ep)
    assert sum(answer["masters"] for answer in answers) == masters * (dense + experts * ranks.ep)
    for answer in answers:
        assert answer["adapters"] == dense + experts
        assert answer["base"] > 4 * answer["adapters"] and answer["base_gradients"] == 0
        assert answer["gradients"] == 4 * answer["adapters"]
