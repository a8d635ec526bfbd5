"""The staleness bound holds by construction, and groups are trained in the order their prompts were drawn."""

import asyncio
import random

import numpy as np
import pytest

from rl_actors.driver.group_queue import GroupQueue
from rl_actors.types import Prompt, Trajectory, TrajectoryGroup


def make_group(number: int, version: int) -> TrajectoryGroup:
    trajectory = Trajectory(
        prompt_id=str(number),
        token_ids=np.zeros(1, np.int32),
        logprobs=np.zeros(1, np.float32),
        versions=np.array([version], np.int32),
        finish_reason="stop",
        text="",
    )
    return TrajectoryGroup(Prompt(str(number), np.zeros(1, np.int32), ""), (trajectory,), np.zeros(1, np.float32))


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("first_version", [0, 5])
def test_staleness_is_bounded_and_reached_and_order_is_kept(max_staleness: int, first_version: int) -> None:
    prompts_per_step, steps = 4, 12
    rng = random.Random(0)

    async def run() -> tuple[list[int], int]:
        queue = GroupQueue(prompts_per_step, max_staleness, first_version)
        trained: list[int] = []
        worst = 0

        async def rollout() -> None:
            async def sample(number: int, version: int) -> None:
                await asyncio.sleep(rng.random() * 0.002)
                await queue.put(number, make_group(number, version))

            async with asyncio.TaskGroup() as tasks:
                for _ in range(prompts_per_step * steps):
                    number = await queue.admit()
                    tasks.create_task(sample(number, queue.version))

        producer = asyncio.create_task(rollout())
        for version in range(first_version, first_version + steps):
            groups = await queue.take()
            trained += [int(group.prompt.id) for group in groups]
            worst = max(worst, max(version - group.oldest_version for group in groups))
            await asyncio.sleep(0.004)
            await queue.advance(version + 1)
        await producer
        return trained, worst

    trained, worst = asyncio.run(asyncio.wait_for(run(), 20))
    first = first_version * prompts_per_step
    assert trained == list(range(first, first + prompts_per_step * steps))
    assert worst == max_staleness


def test_a_failed_rollout_ends_the_wait_for_its_group() -> None:
    async def run() -> None:
        queue = GroupQueue(prompts_per_step=2, max_staleness=0)
        taking = asyncio.create_task(queue.take())
        await asyncio.sleep(0)
        await queue.fail(ValueError("prompt 1: lost"))
        await taking

    with pytest.raises(ValueError, match="prompt 1: lost"):
        asyncio.run(asyncio.wait_for(run(), 5))
