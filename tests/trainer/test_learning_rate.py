"""The learning rate of each step."""

from __future__ import annotations

import pytest

from rl_actors.config import OptimizerConfig
from rl_actors.trainer.learning_rate import learning_rate


def rates(**settings: float | int | str) -> list[float]:
    config = OptimizerConfig.model_validate({"lr": 1.0, "min_lr": 0.2, **settings})
    return [learning_rate(config, step, total_steps=10) for step in range(12)]


def test_warm_up_ends_at_the_full_rate() -> None:
    assert rates(warmup_steps=4)[:6] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_schedules_fall_to_the_least_rate_and_stay(schedule: str) -> None:
    found = rates(schedule=schedule, warmup_steps=2)
    assert found[2] == 1.0
    assert found[6] == pytest.approx(0.6), "half way"
    assert found[10:] == pytest.approx([0.2, 0.2])
    assert found[2:] == sorted(found[2:], reverse=True)


def test_constant() -> None:
    assert rates() == [1.0] * 12
