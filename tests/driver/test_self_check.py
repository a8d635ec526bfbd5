"""What a check of `jobs.verify` calls ok."""

import math

from rl_actors.driver.self_check import Check, Tolerances


def test_a_value_up_to_its_tolerance_is_ok() -> None:
    assert Check("difference", 0.0, 0.0).ok and Check("difference", 1e-4, 1e-4).ok
    assert not Check("difference", 1.1e-4, 1e-4).ok
    assert not Check("difference", math.nan, 1.0).ok


def test_a_floor_must_be_exceeded() -> None:
    assert Check("gradient", 1e-30, 0.0, floor=True).ok
    assert not Check("gradient", 0.0, 0.0, floor=True).ok
    assert not Check("gradient", math.nan, 0.0, floor=True).ok


def test_tolerances_follow_the_type_of_the_weights() -> None:
    assert Tolerances.of("float32", moe=True).largest == 1e-4
    assert Tolerances.of("bfloat16", moe=False).mean < Tolerances.of("bfloat16", moe=True).mean
