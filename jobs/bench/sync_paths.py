"""The driver's side of the three ways to bring the engines to the trainer's weights, each on the same running pools."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, Protocol

from jobs.bench.broadcast_path import BroadcastReceiver, BroadcastSender, plan_stream
from jobs.bench.library_path import LibraryReceiver, LibrarySender, buckets
from jobs.bench.members import Ranks, Workers
from rl_actors.config import RunConfig
from rl_actors.driver.pools import Pools
from rl_actors.weight_sync.sync import TrainerMembers
from rl_actors.weight_sync.transport import choose_transport


class SyncPath(Protocol):
    """One way. Engines are paused before `run` and resumed after it."""

    name: str

    async def set_up(self) -> None:
        """Everything that is done once."""

    async def run(self, version: int) -> int:
        """Returns the bytes that arrived, over all engine workers."""
        ...

    async def close(self) -> None:
        """Leave the groups."""


class _Sides:
    """Both sides of a path, with a part each."""

    def __init__(self, config: RunConfig, pools: Pools, sender: type, receiver: type, device: str) -> None:
        timeout_s = self.timeout_s = config.timeouts.sync_s
        self.ranks = Ranks(pools.trainer.actors, sender, timeout_s + 15)
        self.workers = Workers(pools.rollout.actors, config.rollout.tp, receiver, timeout_s + 15)
        self.device = device
        self.transport = choose_transport(config.sync.transport, device, config.placement.colocate)
        self.bucket_bytes = int(config.sync.bucket_mib * 2**20)

    async def both(
        self, send: str, per_rank: list[tuple[Any, ...]], receive: str, per_worker: list[tuple[Any, ...]]
    ) -> tuple[list[Any], list[Any]]:
        sent, received = await asyncio.gather(self.ranks.call(send, per_rank), self.workers.call(receive, per_worker))
        return sent, received


class Library:
    """Bridge's export, one broadcast, vLLM's loader."""

    name = "library"

    def __init__(self, config: RunConfig, pools: Pools, device: str) -> None:
        self._sides = _Sides(config, pools, LibrarySender, LibraryReceiver, device)

    async def set_up(self) -> None:
        sides, name = self._sides, f"library-{uuid.uuid4().hex[:8]}"
        described = await sides.ranks.call("describe")
        self._plan = buckets(described[0], sides.bucket_bytes)
        last = (len(sides.workers), sides.device, sides.transport, sides.timeout_s)
        await sides.both(
            "join",
            [(name, rank, *last) for rank in range(len(sides.ranks))],
            "join",
            [(name, worker, *last) for worker in range(len(sides.workers))],
        )

    async def run(self, version: int) -> int:
        sides = self._sides
        calls = [(self._plan,)] * len(sides.ranks), [(self._plan,)] * len(sides.workers)
        _, received = await sides.both("send", calls[0], "receive", calls[1])
        return sum(received)

    async def close(self) -> None:
        sides = self._sides
        await sides.both("leave", [()] * len(sides.ranks), "leave", [()] * len(sides.workers))


class Broadcast:
    """Our merge and receiver with one sender."""

    name = "broadcast"

    def __init__(self, config: RunConfig, pools: Pools, device: str) -> None:
        self._sides = _Sides(config, pools, BroadcastSender, BroadcastReceiver, device)
        self._trainer = TrainerMembers(pools.trainer.actors)

    async def set_up(self) -> None:
        sides, name = self._sides, f"broadcast-{uuid.uuid4().hex[:8]}"
        ranks, workers = len(sides.ranks), len(sides.workers)
        holdings = await self._trainer.call("describe", [()] * ranks, sides.timeout_s)
        plan = plan_stream(holdings, sides.bucket_bytes)
        last = (sides.transport, sides.timeout_s)
        await sides.both(
            "enter",
            [(name, rank, ranks, workers, plan, *last) for rank in range(ranks)],
            "enter",
            [(name, worker, workers, plan.receives[0], *last) for worker in range(workers)],
        )

    async def run(self, version: int) -> int:
        sides = self._sides
        _, received = await sides.both("spread", [()] * len(sides.ranks), "take", [()] * len(sides.workers))
        return sum(received)

    async def close(self) -> None:
        sides = self._sides
        await sides.both("exit", [()] * len(sides.ranks), "exit", [()] * len(sides.workers))


class ShardToShard:
    """Weight sync as in production, its pause, checksums and resume included."""

    name = "shard_to_shard"

    def __init__(self, config: RunConfig, pools: Pools, device: str) -> None:
        self._sync = pools.sync
        self.notes: list[str] = []

    async def set_up(self) -> None:
        """The pools' sync has met already."""

    async def run(self, version: int) -> int:
        report = await self._sync.run(version)
        self.notes.append(
            f"{report}; the slowest rank merged for {report.merge_s:.3f} s and waited {report.wait_s:.3f} s"
        )
        return report.bytes

    async def close(self) -> None:
        """Its group belongs to the pools."""


PATHS: tuple[Any, ...] = (Library, Broadcast, ShardToShard)
