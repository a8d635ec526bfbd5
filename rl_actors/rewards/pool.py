"""The CPU actors that score answers. A prompt goes to the worker that has been free the longest.

Invariants:
- Each prompt is scored by one worker, and the time bound runs from when that worker is free: a long queue is not late.
- A worker that dies is replaced and the prompt scored again, once. A function that kills its own process does not
  get that far: the worker outlives it and raises RewardError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from ray.exceptions import RayTaskError

from rl_actors.config import RewardConfig
from rl_actors.errors import ActorDiedError, RewardError
from rl_actors.pool import ActorPool, ActorSpec
from rl_actors.rewards.worker import START_TIMEOUT_S, RewardWorker
from rl_actors.types import Prompt, Trajectory

_SLACK_S = 30.0
"""How much longer the driver waits than the worker's own bound: the way there and back, and a new process."""


class RewardPool:
    """`config.workers` actors named "reward-0", "reward-1" and so on. Ray places them on any free CPU.

    Args:
        num_cpus: CPU share that one worker reserves.
    """

    def __init__(self, config: RewardConfig, run_name: str, num_cpus: float = 0.0) -> None:
        self.config = config
        kwargs = {"function": config.function, "kwargs": config.kwargs, "timeout_s": config.timeout_s}
        names = [f"reward-{number}" for number in range(config.workers)]
        specs = [ActorSpec(name, kwargs=kwargs, num_cpus=num_cpus) for name in names]
        self.actors = ActorPool(RewardWorker, specs, run_name)
        self._free: asyncio.Queue[str] = asyncio.Queue()

    async def start(self, timeout_s: float = START_TIMEOUT_S + _SLACK_S) -> None:
        """Start the workers; each has imported the reward function when this returns.

        Raises:
            ActorDiedError, ActorLateError: a worker did not start; the message has its own error.
        """
        await self.actors.astart(timeout_s)
        self._free = asyncio.Queue()
        for name in self.actors.specs:
            self._free.put_nowait(name)

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> np.ndarray:
        """float32 [G]: the rewards of one prompt's answers. Many prompts may be scored at the same time.

        Raises:
            RewardError: the function failed on this prompt.
            ActorDiedError, ActorLateError: a worker is gone, twice, or does not answer.
        """
        texts = [trajectory.text for trajectory in trajectories]
        name = await self._free.get()
        try:
            return await self._score_on(name, prompt, texts)
        except ActorDiedError:
            await self.actors.arestart(name, START_TIMEOUT_S + _SLACK_S)
            return await self._score_on(name, prompt, texts)
        finally:
            self._free.put_nowait(name)

    async def _score_on(self, name: str, prompt: Prompt, texts: list[str]) -> np.ndarray:
        timeout_s = self.config.timeout_s + _SLACK_S
        try:
            (rewards,) = await self.actors.acall("score", prompt, texts, timeout_s=timeout_s, only=[name])
        except RayTaskError as error:
            raise RewardError(str(error.cause)) from None
        return rewards  # type: ignore[no-any-return]
