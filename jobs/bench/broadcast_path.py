"""Our merge and our receiver, but with one sender: rank 0 gathers every merged shard and broadcasts it to all workers.

The stream of messages is planned as if one worker held every Hugging Face tensor whole. Each real worker gets all of
it and takes out what it holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from jobs.bench.spread import BUFFERS, expect, finish, spread
from rl_actors.rollout.receiver import Placing, WeightReceiver
from rl_actors.weight_sync import shards
from rl_actors.weight_sync.collective import CollectiveGroup, Pending, join_group, leave_group
from rl_actors.weight_sync.holdings import Holdings
from rl_actors.weight_sync.plan import Incoming, Part, Round, SyncPlan, make_plan
from rl_actors.weight_sync.sender import WeightSender
from rl_actors.weight_sync.shards import Piece, Slices, intersect, locate, volume
from rl_actors.weight_sync.wire import message_bytes, window


def plan_stream(ranks: Sequence[Holdings], bucket_bytes: int) -> SyncPlan:
    """Everything that the trainer adapts, for one worker that holds Hugging Face tensors."""
    sizes: dict[str, tuple[int, ...]] = {}
    for piece in (piece for holdings in ranks for piece in holdings.adapted):
        stops = tuple(stop for _, stop in piece.box.slices)
        known = sizes.get(piece.box.name, stops)
        sizes[piece.box.name] = tuple(map(max, stops, known))
    everything = [piece for name, shape in sizes.items() for piece in shards.whole(name, name, shape)]
    numel = bucket_bytes // ranks[0].dtype.itemsize
    return make_plan([holdings.adapted for holdings in ranks], [everything], [0], numel)


class BroadcastSender(WeightSender):
    """In a trainer rank."""

    def __init__(self, worker: Any) -> None:
        super().__init__(worker.model, worker.config.sync.bucket_mib)
        self._gathering: CollectiveGroup | None = None
        self._spreading: CollectiveGroup | None = None
        self._stream: tuple[Incoming, ...] = ()
        self._receivers = 0

    def enter(
        self, name: str, rank: int, ranks: int, receivers: int, plan: SyncPlan, transport: str, timeout_s: float
    ) -> None:
        """Meet the other ranks to gather, and on rank 0 the workers."""
        self._rounds, self._stream, self._receivers = plan.sends[rank], plan.receives[0], receivers
        self._largest_round = max(message_bytes(header.numel, self._dtype) for header in self._stream)
        device = self._device.type
        if ranks > 1:
            self._gathering = join_group(f"{name}-gather", rank, ranks, device, timeout_s)
        if rank == 0:
            self._spreading = join_group(name, 0, 1 + receivers, device, timeout_s, transport)

    def exit(self) -> None:
        self._kept = [None] * BUFFERS
        for group in (self._gathering, self._spreading):
            if group is not None:
                leave_group(group.group_name)

    def spread(self) -> None:
        """Merge, gather, broadcast. Collective over the ranks."""
        self._merger.gather()
        if self._spreading is None:
            assert self._gathering is not None
            self._send_own(self._gathering)
        else:
            self._relay(self._spreading)
        self._merger.release()
        if self._spreading is None or not self._spreading.keeps_buffers:
            self._kept = [None] * BUFFERS

    def _send_own(self, group: CollectiveGroup) -> None:
        travelling: list[list[Pending]] = [[] for _ in range(BUFFERS)]
        for number, one in enumerate(self._rounds):
            slot = number % BUFFERS
            finish(travelling[slot])
            travelling[slot] = [group.isend(self._fill(one, slot, group), 0, number)]
        for pending in travelling:
            finish(pending)

    def _relay(self, group: CollectiveGroup) -> None:
        own = iter(self._rounds)
        travelling: list[list[Pending]] = [[] for _ in range(BUFFERS)]
        for number, header in enumerate(self._stream):
            slot = number % BUFFERS
            finish(travelling[slot])
            if header.sender == 0:
                message = self._fill(next(own), slot, group)
            else:
                assert self._gathering is not None
                message = self._buffer(slot, group)[: message_bytes(header.numel, self._dtype)]
                self._gathering.irecv(message, header.sender, header.tag).wait()
            travelling[slot] = spread(group, message, self._receivers, number)
        for pending in travelling:
            finish(pending)

    def _fill(self, one: Round, slot: int, group: CollectiveGroup) -> torch.Tensor:
        self._kept[slot], (message,) = self._pack(one, self._buffer(slot, group), group)
        return message

    def _buffer(self, slot: int, group: CollectiveGroup) -> torch.Tensor:
        buffer = self._kept[slot]
        if buffer is None:
            buffer = self._kept[slot] = group.allocate(self._largest_round)
        return buffer


class BroadcastReceiver(WeightReceiver):
    """In an engine worker."""

    def __init__(self, worker: Any) -> None:
        super().__init__(worker.get_model())
        self._takes: list[list[tuple[int, Part, Slices, Part]]] = []

    def enter(
        self, name: str, rank: int, receivers: int, stream: tuple[Incoming, ...], transport: str, timeout_s: float
    ) -> None:
        """Find out what to take from each message, and meet rank 0."""
        held: dict[str, list[Piece]] = defaultdict(list)
        for piece in (piece for one in self._modules.values() for piece in one.pieces):
            held[piece.box.name].append(piece)
        self._takes = [list(_takes(header, held)) for header in stream]
        self._stream = stream
        self._incoming = tuple(
            Incoming(header.sender, header.tag, tuple(target for *_, target in takes), header.numel)
            for header, takes in zip(stream, self._takes, strict=True)
        )
        self._choose_ways()
        self._group = join_group(name, 1 + rank, 1 + receivers, self._device.type, timeout_s, transport)

    def exit(self) -> None:
        self.leave()

    def take(self) -> int:
        """Returns the bytes received."""
        group = self._group
        assert group is not None
        placing = Placing(self._modules, self._incoming)
        buffers = [torch.empty(self._largest, dtype=torch.uint8, device=self._device) for _ in range(BUFFERS)]
        coming = [self._post(number, buffers, group) for number in range(min(BUFFERS, len(self._stream)))]
        received = 0
        for number, takes in enumerate(self._takes):
            message, pending = coming.pop(0)
            pending.wait()
            received += message.numel()
            for offset, part, source, target in takes:
                values = message.view(self._dtype)[offset : offset + volume(part.local)].view(part.shape)
                taken = window(values, source).reshape(-1)
                placing.place(Incoming(0, number, (target,), taken.numel()), taken)
            if self._device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            if number + BUFFERS < len(self._stream):
                coming.append(self._post(number + BUFFERS, buffers, group))
        placing.check_complete()
        return received

    @property
    def _largest(self) -> int:
        return max(message_bytes(header.numel, self._dtype) for header in self._stream)

    def _post(self, number: int, buffers: list[torch.Tensor], group: CollectiveGroup) -> tuple[torch.Tensor, Pending]:
        message = buffers[number % BUFFERS][: message_bytes(self._stream[number].numel, self._dtype)]
        return message, expect(group, message, number)


def _takes(header: Incoming, held: dict[str, list[Piece]]) -> Any:
    """(offset of the part in the message, the part, rectangle within it, where it goes) of what a worker holds."""
    offset = 0
    for part in header.parts:
        for piece in held[part.param]:
            common = intersect(piece.box.slices, part.local)
            if common:
                moved = tuple((a - start, b - start) for (a, b), (start, _) in zip(common, part.local, strict=True))
                yield offset, part, moved, Part(piece.param, locate(piece, common))
        offset += volume(part.local)
