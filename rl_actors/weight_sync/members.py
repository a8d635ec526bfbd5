"""How the driver reaches the members of a sync: one method call to all of a side, each with its own arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rl_actors.pool import ActorPool


class Members(Protocol):
    """One side of the sync: trainer ranks, or engine workers (all TP workers of engine 0, then engine 1, ...)."""

    @property
    def engines(self) -> Sequence[int]:
        """For each member the engine, or trainer, it belongs to; its length is the number of members."""
        ...

    async def call(self, method: str, per_member: Sequence[tuple[Any, ...]], timeout_s: float) -> list[Any]:
        """Call the sender's or receiver's method on every member, each with its own arguments."""
        ...

    async def silent(self, timeout_s: float) -> list[str]:
        """The actors that do not answer in time though they may be busy: stopped, cut off or dead."""
        ...


class TrainerMembers:
    """Megatron ranks of a pool whose actors have `weights(method, *arguments)`, which calls their `WeightSender`."""

    def __init__(self, pool: ActorPool) -> None:
        self._pool = pool

    @property
    def engines(self) -> Sequence[int]:
        return [0] * len(self._pool.specs)

    async def call(self, method: str, per_member: Sequence[tuple[Any, ...]], timeout_s: float) -> list[Any]:
        return await self._pool.acall(
            "weights", timeout_s=timeout_s, per_actor=[(method, *arguments) for arguments in per_member]
        )

    async def silent(self, timeout_s: float) -> list[str]:
        return await self._pool.asilent(timeout_s)


class EngineMembers:
    """Workers of engines whose actors have `apply_model(function, *arguments)`.

    Args:
        pool: one actor for each engine.
        workers_per_engine: the engines' TP size.
    """

    def __init__(self, pool: ActorPool, workers_per_engine: int) -> None:
        self._pool, self._workers = pool, workers_per_engine

    @property
    def engines(self) -> Sequence[int]:
        return [engine for engine in range(len(self._pool.specs)) for _ in range(self._workers)]

    async def call(self, method: str, per_member: Sequence[tuple[Any, ...]], timeout_s: float) -> list[Any]:
        from rl_actors.rollout.receiver import call_receiver

        per_engine = [list(per_member[i : i + self._workers]) for i in range(0, len(per_member), self._workers)]
        answers = await self._pool.acall(
            "apply_model",
            timeout_s=timeout_s,
            per_actor=[(call_receiver, method, arguments) for arguments in per_engine],
        )
        return [answer for engine in answers for answer in engine]

    async def silent(self, timeout_s: float) -> list[str]:
        return await self._pool.asilent(timeout_s)
