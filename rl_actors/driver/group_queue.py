"""Groups in flight between rollout and training, and the rule that bounds their staleness.

Groups are numbered in the order their prompts are drawn, and are trained in that order: step s trains groups
s*P to (s+1)*P - 1, where P is prompts_per_step. Group g may start only once g // P <= version + max_staleness.
It is trained at version g // P, and all its tokens were sampled at the version it started at or later, so

    trainer version - oldest token version <= max_staleness

holds by construction. Training in order rather than as groups finish keeps slow (long) answers in the batch they
belong to: nothing is dropped for being slow, which would bias training towards short answers. It also makes the
data cursor of a checkpoint exact: after step s, every prompt up to (s+1)*P is trained and no later one is.
"""

from __future__ import annotations

import asyncio

from rl_actors.types import TrajectoryGroup


class GroupQueue:
    """Admits group numbers to rollout, holds finished groups, hands them out step by step. For one event loop."""

    def __init__(self, prompts_per_step: int, max_staleness: int, version: int = 0) -> None:
        self._prompts_per_step = prompts_per_step
        self._max_staleness = max_staleness
        self._version = version
        self._next_group = version * prompts_per_step
        self._finished: dict[int, TrajectoryGroup] = {}
        self._error: BaseException | None = None
        self._changed = asyncio.Condition()

    @property
    def version(self) -> int:
        return self._version

    @property
    def depth(self) -> int:
        """Finished groups that wait for training."""
        return len(self._finished)

    async def admit(self) -> int:
        """The number of the next group to sample, as soon as the staleness bound lets it start."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._next_group // self._prompts_per_step <= self._version + self._max_staleness
            )
            group, self._next_group = self._next_group, self._next_group + 1
            return group

    async def put(self, number: int, group: TrajectoryGroup) -> None:
        async with self._changed:
            self._finished[number] = group
            self._changed.notify_all()

    async def fail(self, error: BaseException) -> None:
        """Make `take` raise `error`: a group of an admitted prompt will never come."""
        async with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    async def take(self) -> list[TrajectoryGroup]:
        """The groups of the current version's step, in order. Raises what `fail` was told, if that came first.

        There is no timeout here: every rollout and every reward has one, and ends in `put` or `fail`.
        """
        first = self._version * self._prompts_per_step
        wanted = range(first, first + self._prompts_per_step)
        async with self._changed:
            await self._changed.wait_for(lambda: self._error or all(number in self._finished for number in wanted))
            if self._error:
                raise self._error
            return [self._finished.pop(number) for number in wanted]

    async def advance(self, version: int) -> None:
        """Tell that `version` is published, which lets later groups start."""
        async with self._changed:
            self._version = version
            self._changed.notify_all()
