"""Several coroutines at once: results in order, or one plain error."""

import asyncio

import pytest

from rl_actors.driver.together import together


async def after(seconds: float, result: str) -> str:
    await asyncio.sleep(seconds)
    if result == "bad":
        raise ValueError("the first failure")
    return result


def test_results_come_in_the_order_given() -> None:
    assert asyncio.run(together(after(seconds, name) for seconds, name in [(0.02, "a"), (0.0, "b")])) == ["a", "b"]


def test_the_first_failure_is_raised_as_itself_and_ends_the_others() -> None:
    with pytest.raises(ValueError, match="the first failure"):
        asyncio.run(asyncio.wait_for(together([after(60, "late"), after(0.01, "bad")]), 5))
