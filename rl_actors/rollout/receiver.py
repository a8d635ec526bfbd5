"""The engine worker's side of a weight sync; it lives inside each vLLM worker.

`call_receiver` is what the engine runs on its workers (`apply_model`) between two steps while it is paused. Extra
memory is two message buffers, or none where the sender's memory is mapped, and for modules that must go through vLLM's
layerwise reload one module in model form.

Invariant: `receive` acknowledges only after every message is in its place. Until the driver has seen matching
checksums from all workers the engine stays paused, so half-written weights are never served.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rl_actors.errors import SyncError
from rl_actors.weight_sync.collective import Arrival, CollectiveGroup, join_group, leave_group
from rl_actors.weight_sync.holdings import Holdings
from rl_actors.weight_sync.ipc_memory import place
from rl_actors.weight_sync.lora_slot import SlotModule, slot_of
from rl_actors.weight_sync.plan import Incoming, Part
from rl_actors.weight_sync.vllm_shards import WorkerModule, try_direct, worker_modules
from rl_actors.weight_sync.wire import checksum, checksum_parts, copy_all, message_bytes, window

BUFFERS = 2
_ATTRIBUTE = "_rl_actors_receiver"


@dataclass(frozen=True)
class ReceiveReport:
    """What a worker received.

    Attributes:
        version: as told by the driver.
        checksums: by (sender rank, tag).
        bytes: received.
        seconds: of the whole receive.
        reloaded: modules that went through layerwise reload; the others were written in place.
        written: modules that got new values.
    """

    version: int
    checksums: dict[tuple[int, int], int]
    bytes: int
    seconds: float
    reloaded: int
    written: int


def call_receiver(model: nn.Module, method: str, per_worker: Sequence[tuple[Any, ...]]) -> Any:
    """Call a method of this worker's receiver, made on first use. `per_worker` has the arguments of each TP rank."""
    from vllm.distributed import get_tensor_model_parallel_rank

    receiver = model.__dict__.get(_ATTRIBUTE)
    if receiver is None:
        receiver = model.__dict__[_ATTRIBUTE] = WeightReceiver(model)
    return getattr(receiver, method)(*per_worker[get_tensor_model_parallel_rank()])


class WeightReceiver:
    """Writes what trainer ranks send into one vLLM worker. `describe`, `join`, then `receive` each version.

    What may be written are the model's weights and, if the engine serves an adapter, the adapter's slot.
    """

    def __init__(self, model: nn.Module) -> None:
        self._base = {one.name: one for one in worker_modules(model)}
        self._modules: dict[str, WorkerModule | SlotModule] = self._base | {one.name: one for one in slot_of(model)}
        weight = next(iter(model.parameters()))
        self._device, self._dtype = weight.device, weight.dtype
        self._group: CollectiveGroup | None = None
        self._incoming: tuple[Incoming, ...] = ()

    def describe(self) -> Holdings:
        """All pieces as `adapted` (any of them may be asked for), those that can be compared as `fixed`."""
        base = self._base.values()
        return Holdings(
            adapted=[piece for one in self._modules.values() for piece in one.pieces],
            fixed=[piece for one in base if one.readable for piece in one.pieces],
            dtype=self._dtype,
            device=self._device.type,
            place=place(self._device.type),
            unread=[f"{one.name}.{name}" for one in base if not one.readable for name in one.shapes],
        )

    def join(
        self,
        group_name: str,
        rank: int,
        world_size: int,
        incoming: tuple[Incoming, ...],
        timeout_s: float,
        transport: str = "auto",
    ) -> dict[str, bool]:
        """Enter the group. Returns for each kind of module that will be written whether it is written directly."""
        self._incoming = incoming
        ways = self._choose_ways()
        self.leave()
        self._group = join_group(group_name, rank, world_size, self._device.type, timeout_s, transport)
        return ways

    def leave(self) -> None:
        """Close this end of the group."""
        if self._group is not None:
            leave_group(self._group.group_name)
            self._group = None

    def checksums(self, parts: tuple[Part, ...]) -> list[int]:
        """Of present weights, rectangle by rectangle."""
        return checksum_parts(parts, self._parameter)

    @torch.no_grad()
    def receive(self, version: int) -> ReceiveReport:
        """Receive everything once and put it in place.

        Raises:
            SyncError: a member is lost, late, or the driver aborted. The weights may then be half-written.
        """
        group = self._group
        if group is None:
            raise SyncError("this engine worker is in no sync group: the driver must set it up first")
        started = time.perf_counter()
        placing = Placing(self._modules, self._incoming)
        posted: deque[tuple[Incoming, Arrival]] = deque()
        spare: list[torch.Tensor] = []
        upcoming = iter(self._incoming)
        sums: dict[tuple[int, int], torch.Tensor] = {}

        def post(count: int) -> None:
            for header in itertools.islice(upcoming, count):
                size = message_bytes(header.numel, self._dtype)
                posted.append((header, group.expect(size, header.sender, header.tag, spare)))

        post(BUFFERS)
        received = 0
        while posted:
            header, arrival = posted.popleft()
            message = arrival.wait()
            received += message.numel()
            sums[header.sender, header.tag] = checksum(message)
            placing.place(header, message[: header.numel * self._dtype.itemsize].view(self._dtype))
            arrival.release()
            post(1)
        placing.check_complete()
        totals = {key: int(total) for key, total in sums.items()}
        seconds = time.perf_counter() - started
        return ReceiveReport(version, totals, received, seconds, placing.reloaded, placing.written)

    def _parameter(self, name: str) -> torch.Tensor:
        module, _, leaf = name.rpartition(".")
        return getattr(self._base[module].module, leaf).detach()  # type: ignore[no-any-return]

    def _choose_ways(self) -> dict[str, bool]:
        wanted = {part.param.rpartition(".")[0] for header in self._incoming for part in header.parts}
        known: dict[tuple[Any, ...], bool] = {}
        for name in sorted(wanted):
            one = self._modules[name]
            if isinstance(one, WorkerModule) and one.direct is None:
                one.direct = known[one.kind] if one.kind in known else try_direct(one)
            known[one.kind] = bool(one.direct)
        return {f"{kind[0].__name__} {dict(kind[2])}": direct for kind, direct in known.items()}


class Placing:
    """One sync's values on their way into the modules."""

    def __init__(self, modules: Mapping[str, WorkerModule | SlotModule], incoming: tuple[Incoming, ...]) -> None:
        self._modules = modules
        self._missing: dict[str, int] = {}
        for header in incoming:
            for part in header.parts:
                name = part.param.rpartition(".")[0]
                self._missing[name] = self._missing.get(name, 0) + torch.Size(part.shape).numel()
        self._filled = {
            name
            for name, numel in self._missing.items()
            if isinstance(one := modules[name], WorkerModule)
            and numel == sum(torch.Size(shape).numel() for shape in one.shapes.values())
        }
        self._staged: dict[str, dict[str, torch.Tensor]] = {}
        self.reloaded = self.written = 0

    def place(self, header: Incoming, values: torch.Tensor) -> None:
        """Copy a message's elements to where they belong; finish the modules that are complete with it."""
        offset = 0
        pairs, complete = [], []
        for part in header.parts:
            numel = torch.Size(part.shape).numel()
            name, _, leaf = part.param.rpartition(".")
            target = window(self._target(name, leaf, values), part.local)
            pairs.append((target, values[offset : offset + numel].view(part.shape)))
            offset += numel
            self._missing[name] -= numel
            if self._missing[name] == 0:
                complete.append(name)
        copy_all(pairs)
        for name in complete:
            self._finish(name)

    def check_complete(self) -> None:
        """Raises SyncError if the plan left a module unfinished."""
        unfinished = sorted(name for name, missing in self._missing.items() if missing)
        if unfinished:
            raise SyncError(f"the plan does not fill {', '.join(unfinished)}")

    def _target(self, name: str, leaf: str, values: torch.Tensor) -> torch.Tensor:
        one = self._modules[name]
        if isinstance(one, SlotModule) or one.direct:
            return one.tensor(leaf)
        staged = self._staged.setdefault(name, {})
        if leaf not in staged:
            # What no Hugging Face tensor fills is padding, of zeros.
            make = torch.empty if name in self._filled else torch.zeros
            staged[leaf] = make(one.shapes[leaf], dtype=values.dtype, device=values.device)
        return staged[leaf]

    def _finish(self, name: str) -> None:
        self.written += 1
        self.reloaded += self._modules[name].finish(self._staged.pop(name, None))
