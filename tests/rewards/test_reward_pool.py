"""Real actors: rewards come back in order, errors name the prompt, and a killed worker is replaced."""

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import ray

from rl_actors.config import RewardConfig
from rl_actors.errors import ActorDiedError, RewardError
from rl_actors.rewards.pool import RewardPool
from rl_actors.types import Trajectory


@pytest.fixture(scope="module")
def cluster():
    # Ray's workers do not have pytest's import path.
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path.cwd())])}}
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield
    ray.shutdown()


def trajectories(*texts):
    one = np.zeros(1, np.int32)
    return [Trajectory("row-7", one, one.astype(np.float32), one, "stop", text) for text in texts]


def test_pool(cluster, prompt):
    """One pool for all, since starting it is what takes time."""

    async def use():
        pool = RewardPool(RewardConfig(function="reward_samples:raises", workers=2, timeout_s=20.0), "test-rewards")
        await pool.start()
        try:
            many = await asyncio.gather(*(pool.score(prompt(), trajectories("good", "good")) for _ in range(20)))
            assert all(rewards.tolist() == [1.0, 1.0] and rewards.dtype == np.float32 for rewards in many)

            with pytest.raises(RewardError, match="'reward_samples:raises' on prompt 'row-7': KeyError"):
                await pool.score(prompt(), trajectories("good", "bad"))

            os.kill(pool.actors.actors["reward-0"].where.pid, signal.SIGKILL)
            again = await asyncio.gather(*(pool.score(prompt(), trajectories("good")) for _ in range(4)))
            assert [rewards.tolist() for rewards in again] == [[1.0]] * 4
        finally:
            await pool.actors.akill()

    asyncio.run(use())


def test_function_that_cannot_start(cluster):
    async def use():
        pool = RewardPool(RewardConfig(function="reward_samples:nothing"), "test-rewards-broken")
        with pytest.raises(ActorDiedError, match="has no 'nothing'"):
            await pool.start(60.0)

    asyncio.run(use())
