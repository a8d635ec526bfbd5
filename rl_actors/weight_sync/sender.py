"""The trainer rank's side of a sync: merge a round, pack it, send it, and merge the next one meanwhile.

In adapter mode A and scale * B take the place of merged weights; all else is the same.

Extra memory is two buffers of about one bucket (one is filled while the other travels), the merged shard of one weight
or batch of experts, and its float32 scratch. A buffer is filled again only when all receivers have its last content.
Where receivers map the buffers (`cuda_ipc`), the two are kept between syncs.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rl_actors.config import SyncMode
from rl_actors.errors import SyncError
from rl_actors.weight_sync.collective import CollectiveGroup, Pending, join_group, leave_group
from rl_actors.weight_sync.factors import FactorSource
from rl_actors.weight_sync.holdings import Holdings, TrainerShards
from rl_actors.weight_sync.merge import Merger
from rl_actors.weight_sync.plan import Outgoing, Part, Round
from rl_actors.weight_sync.wire import checksum, checksum_parts, copy_all, message_bytes, window

if TYPE_CHECKING:
    from rl_actors.trainer.model import TrainerModel

BUFFERS = 2
Targets = dict[str, list[tuple[Part, torch.Tensor]]]
"""For each parameter its rectangles that are sent, and where in the buffer each one goes."""


@dataclass(frozen=True)
class SendReport:
    """What a rank sent.

    Attributes:
        version: as told by the driver.
        checksums: by (receiver, tag); the receiver must have the same.
        bytes: sent, over all receivers.
        merge_s: spent merging and packing (on GPU: launching it), beside the transfers of earlier rounds.
        wait_s: spent waiting for receivers. Where merging hides behind transfers, it is nearly all of the rest.
        seconds: of the whole send.
        peak_extra_bytes: of GPU memory beyond what was in use before; on CPU the size of the buffers.
    """

    version: int
    checksums: dict[tuple[int, int], int]
    bytes: int
    merge_s: float
    wait_s: float
    seconds: float
    peak_extra_bytes: int


class WeightSender:
    """Lives in a Megatron rank's process. `describe` once, `join`, then `send` for every version.

    Args:
        model: this rank's model, with its adapters.
        bucket_mib: size of one buffer.
        mode: `sync.mode`.
    """

    def __init__(self, model: TrainerModel, bucket_mib: float, mode: SyncMode = "merged") -> None:
        self._shards = TrainerShards(model, send_factors=mode == "adapter")
        self._device = model.torch_device
        self._dtype: torch.dtype = model.config.params_dtype
        self._merger: Merger | FactorSource = (
            FactorSource(model.adapters, self._dtype)
            if mode == "adapter"
            else Merger(model.adapters, self._dtype, int(bucket_mib * 2**20) // 4)
        )
        self._group: CollectiveGroup | None = None
        self._rounds: tuple[Round, ...] = ()
        self._first_receiver = 0
        self._largest_round = 0
        self._kept: list[torch.Tensor | None] = [None] * BUFFERS
        self._targets: dict[tuple[str, ...], Targets] = {}

    def describe(self) -> Holdings:
        """This rank's pieces."""
        return self._shards.holdings()

    def join(
        self,
        group_name: str,
        rank: int,
        world_size: int,
        first_receiver: int,
        rounds: tuple[Round, ...],
        timeout_s: float,
        transport: str = "auto",
    ) -> dict[str, int]:
        """Enter the group of trainer ranks and engine workers; receivers start at `first_receiver` in it.

        Returns:
            bytes that this rank will send with each version, by how they reach their receiver.
        """
        self.leave()
        self._group = join_group(group_name, rank, world_size, self._device.type, timeout_s, transport)
        self._first_receiver, self._rounds = first_receiver, rounds
        self._largest_round = max((sum(self._sizes(one)) for one in rounds), default=0)
        links: dict[str, int] = defaultdict(int)
        for message in (message for one in rounds for message in one.messages):
            for receiver in message.receivers:
                links[self._group.link(first_receiver + receiver)] += message_bytes(message.numel, self._dtype)
        return dict(links)

    def leave(self) -> None:
        """Close this end of the group."""
        if self._group is not None:
            leave_group(self._group.group_name)
            self._group = None
        self._drop_buffers()

    def _drop_buffers(self) -> None:
        self._kept = [None] * BUFFERS
        self._targets.clear()

    def checksums(self, parts: tuple[Part, ...]) -> list[int]:
        """Of the base weights, rectangle by rectangle."""
        return checksum_parts(parts, self._shards.tensors.__getitem__)

    @torch.no_grad()
    def send(self, version: int) -> SendReport:
        """Merge and send everything once. Collective over the trainer ranks.

        Raises:
            SyncError: a member is lost, late, or the driver aborted.
        """
        if self._group is None:
            raise SyncError("this trainer rank is in no sync group: the driver must set it up first")
        started, before = time.perf_counter(), self._memory(reset=True)
        self._merger.gather()
        travelling: list[list[Pending]] = [[] for _ in range(BUFFERS)]
        if not self._group.keeps_buffers:
            self._drop_buffers()
        buffers = self._kept
        sums: dict[tuple[int, int], torch.Tensor] = {}
        sent, merge_s, wait_s = 0, 0.0, 0.0
        for index, one in enumerate(self._rounds):
            slot = index % BUFFERS
            wait_s += _finish(travelling[slot])
            merging = time.perf_counter()
            buffers[slot], messages = self._pack(one, buffers[slot], self._group)
            merge_s += time.perf_counter() - merging
            for outgoing, message in zip(one.messages, messages, strict=True):
                total = checksum(message)
                for receiver, tag in zip(outgoing.receivers, outgoing.tags, strict=True):
                    sums[receiver, tag] = total
                    sent += message.numel()
                    travelling[slot].append(self._group.isend(message, self._first_receiver + receiver, tag))
        wait_s += sum(_finish(pending) for pending in travelling)
        peak = self._memory() - before if self._device.type == "cuda" else self._buffer_bytes(buffers)
        self._merger.release()
        if not self._group.keeps_buffers:
            self._drop_buffers()
        totals = {key: int(total) for key, total in sums.items()}
        return SendReport(version, totals, sent, merge_s, wait_s, time.perf_counter() - started, peak)

    def _sizes(self, one: Round) -> list[int]:
        return [message_bytes(message.numel, self._dtype) for message in one.messages]

    def _pack(
        self, one: Round, buffer: torch.Tensor | None, group: CollectiveGroup
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Merge the round's weights, each once, and copy their rectangles to where the messages want them."""
        sizes = self._sizes(one)
        if buffer is None or buffer.numel() < sum(sizes):
            buffer = group.allocate(self._largest_round)
            self._targets.clear()
        messages = list(buffer[: sum(sizes)].split(sizes))
        for header, message in zip(one.messages, messages, strict=True):
            message[header.numel * self._dtype.itemsize :].zero_()
        if one.params not in self._targets:
            self._targets[one.params] = self._lay_out(one.messages, messages)
        targets = self._targets[one.params]
        for values in self._values(one.params):
            wanted = [(target, window(tensor, part.local)) for name, tensor in values for part, target in targets[name]]
            copy_all(wanted)
        return buffer, messages

    def _values(self, names: Sequence[str]) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Each parameter as the engines should have it: merged if it has an adapter, else as it is."""
        yield from self._merger.merged_together([name for name in names if name in self._merger.shards])
        yield [(name, self._shards.tensors[name]) for name in names if name not in self._merger.shards]

    def _lay_out(self, outgoing: tuple[Outgoing, ...], messages: list[torch.Tensor]) -> Targets:
        targets: Targets = defaultdict(list)
        for header, message in zip(outgoing, messages, strict=True):
            elements = message[: header.numel * self._dtype.itemsize].view(self._dtype)
            offset = 0
            for part in header.parts:
                numel = torch.Size(part.shape).numel()
                targets[part.param].append((part, elements[offset : offset + numel].view(part.shape)))
                offset += numel
        return targets

    def _memory(self, reset: bool = False) -> int:
        if self._device.type != "cuda":
            return 0
        if reset:
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        return torch.cuda.max_memory_allocated()

    def _buffer_bytes(self, buffers: list[torch.Tensor | None]) -> int:
        return sum(buffer.nbytes for buffer in buffers if buffer is not None) + self._merger.buffer_bytes


def _finish(pending: list[Pending]) -> float:
    """Wait for all of them, and forget them; returns the seconds it took."""
    started = time.perf_counter()
    while pending:
        pending.pop(0).wait()
    return time.perf_counter() - started
