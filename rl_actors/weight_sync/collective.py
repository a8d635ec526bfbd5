"""A Ray collective backend that never touches torch's default process group.

Megatron and vLLM each own a default group in their processes, so trainer ranks and engine workers meet in a group
of its own: a TCPStore found through Ray's internal KV, gloo between CPUs, NCCL between GPUs. `ipc.py` has the group for
members that share GPUs.

Invariant: nobody waits for ever. Every wait ends with its data, at the group's timeout, or soon after any member
(or the driver) has called `abort_group`, which all members see through Ray's KV. No call into a busy actor is needed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import ray
import ray.util.collective as ray_collective
import torch
import torch.distributed as dist
from ray.experimental import internal_kv
from ray.util.collective.backend_registry import register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import (
    AllReduceOptions,
    BarrierOptions,
    BroadcastOptions,
    RecvOptions,
    ReduceOp,
    SendOptions,
)

from rl_actors.errors import SyncError
from rl_actors.weight_sync.process_groups import make_gloo, make_nccl, watch_gloo, watch_nccl
from rl_actors.weight_sync.transport import MAPPING

BACKEND = "RL_ACTORS"
IPC_BACKEND = "RL_ACTORS_IPC"
KV_NAMESPACE = "rl_actors_groups"
ABORT_POLL_S = 0.25
DEFAULT_TIMEOUT_S = 300.0

_REDUCE_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
}


@dataclass(frozen=True)
class GroupSettings:
    """What Ray's constructor signature (world size, rank, name) leaves out."""

    device: str
    timeout_s: float
    transport: str
    place: str | None = None


_settings: dict[str, GroupSettings] = {}


def join_group(
    group_name: str,
    rank: int,
    world_size: int,
    device: str,
    timeout_s: float,
    transport: str = "auto",
    place: str | None = None,
) -> CollectiveGroup:
    """Enter a group from inside a Ray actor or task; returns when all members are in.

    A group name is good for one life of a group: take a new one after an abort.

    Args:
        device: "cpu", or "cuda" (the process's current device).
        timeout_s: bound of the joining itself and of every later wait.
        transport: "gloo" (tensors on a GPU go through host memory), "nccl", or one of MAPPING (`ipc.IpcGroup`); "auto"
            is gloo on CPU and NCCL on GPU.
        place: where this member's memory is, for those that map it; None is the truth (`ipc_memory.place`).

    Raises:
        SyncError: somebody did not come, naming the missing ranks.
    """
    register_backend()
    device = torch.device(device).type
    if transport == "auto":
        transport = "nccl" if device == "cuda" else "gloo"
    _settings[group_name] = GroupSettings(device, timeout_s, transport, place)
    backend = IPC_BACKEND if transport in MAPPING else BACKEND
    ray_collective.init_collective_group(world_size, rank, cast(Any, backend), group_name)
    return ray_collective.get_group_handle(group_name)


def leave_group(group_name: str) -> None:
    """Close this process's end; does nothing if it is not a member."""
    _settings.pop(group_name, None)
    if ray_collective.is_group_initialized(group_name):
        ray_collective.destroy_collective_group(group_name)


def abort_group(group_name: str, reason: str) -> None:
    """Make every wait of every member end with `reason`. Any process of the Ray cluster may call it."""
    internal_kv._internal_kv_put(_abort_key(group_name), reason, overwrite=False, namespace=KV_NAMESPACE)


def register_backend() -> None:
    """Make `RL_ACTORS` and `RL_ACTORS_IPC` known to ray.util.collective in this process."""
    from ray.util.collective.backend_registry import _global_registry

    from rl_actors.weight_sync.ipc import IpcGroup

    for group_class in (CollectiveGroup, IpcGroup):
        if not _global_registry.is_registered(group_class.backend()):
            register_collective_backend(group_class.backend(), group_class)


class Pending:
    """A transfer under way. `wait` returns when the buffer may be reused."""

    def __init__(self, group: CollectiveGroup, work: Any, what: str) -> None:
        self._group, self._work, self._what = group, work, what

    def wait(self) -> None:
        """Raises SyncError at the group's timeout, on a lost peer, or after an abort."""
        self._group._wait(self._work, self._what)


class Arrival:
    """A message under way to this member, in a buffer that `spare` has again after `release`."""

    def __init__(self, pending: Pending, buffer: torch.Tensor, nbytes: int, spare: list[torch.Tensor]) -> None:
        self._pending, self._buffer, self._nbytes, self._spare = pending, buffer, nbytes, spare

    def wait(self) -> torch.Tensor:
        """Its bytes, which stay as they are until `release`. Raises SyncError as `Pending.wait` does."""
        self._pending.wait()
        return self._buffer[: self._nbytes]

    def release(self) -> None:
        """The message has been read; where its bytes are the sender's own memory, the sender is told."""
        self._spare.append(self._buffer)


class _HostReceive(Pending):
    """A message that arrives in host memory for a tensor on a GPU."""

    def __init__(self, arrival: Pending, host: torch.Tensor, target: torch.Tensor) -> None:
        self._arrival, self._host, self._target = arrival, host, target

    def wait(self) -> None:
        self._arrival.wait()
        self._target.copy_(self._host)


class CollectiveGroup(BaseGroup):
    """One member's end of a group. Tensors must be contiguous and live on the group's device."""

    keeps_buffers = False
    """Whether senders should send from the same few buffers for the whole life of their process."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        device, transport = ("cuda", "nccl") if torch.cuda.is_available() else ("cpu", "gloo")
        settings = _settings.get(group_name) or GroupSettings(device, DEFAULT_TIMEOUT_S, transport)
        self.device, self.timeout_s, self.transport = settings.device, settings.timeout_s, settings.transport
        self.place = settings.place or self._find_place()
        self._aborted: str | None = None
        self._store: dist.TCPStore | None = _meet(group_name, rank, world_size, self.timeout_s, self.place)
        make = make_nccl if self.transport == "nccl" else make_gloo
        self._process_group: Any = make(self._store, rank, world_size, self.timeout_s)

    @classmethod
    def backend(cls) -> str:
        return BACKEND

    @classmethod
    def check_backend_availability(cls) -> bool:
        return dist.is_available()

    def link(self, rank: int) -> str:
        """In words, how bytes reach another member."""
        return self.transport

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 buffer that can be sent from."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def isend(self, tensor: torch.Tensor, receiver: int, tag: int = 0) -> Pending:
        """Start sending. Messages between two ranks arrive in the order they were started (NCCL ignores tags)."""
        if self._by_host:
            tensor = _pinned_like(tensor).copy_(tensor)
        return self._start(lambda pg: pg.send([tensor], receiver, tag), f"sending to rank {receiver}")

    def irecv(self, tensor: torch.Tensor, sender: int, tag: int = 0) -> Pending:
        """Start receiving into `tensor`."""
        target = _pinned_like(tensor) if self._by_host else tensor
        arrival = self._start(lambda pg: pg.recv([target], sender, tag), f"receiving from rank {sender}")
        return _HostReceive(arrival, target, tensor) if self._by_host else arrival

    def expect(self, nbytes: int, sender: int, tag: int, spare: list[torch.Tensor]) -> Arrival:
        """Start receiving a message where it costs least: in a `spare` buffer or a new one, if not in the sender's."""
        buffer = spare.pop() if spare else None
        if buffer is None or buffer.numel() < nbytes:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return Arrival(CollectiveGroup.irecv(self, buffer[:nbytes], sender, tag), buffer, nbytes, spare)

    def ibroadcast(self, tensor: torch.Tensor, root: int) -> Pending:
        """Start sending `tensor` of `root` to everybody."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._start(lambda pg: pg.broadcast([tensor], options), f"broadcast from rank {root}")

    def send(self, tensor: list[torch.Tensor], send_options: SendOptions) -> None:
        self.isend(tensor[0], send_options.dst_rank).wait()

    def recv(self, tensor: list[torch.Tensor], recv_options: RecvOptions) -> None:
        self.irecv(tensor[0], recv_options.src_rank).wait()

    def broadcast(self, tensor: list[torch.Tensor], broadcast_options: BroadcastOptions = BroadcastOptions()) -> None:  # noqa: B008
        self.ibroadcast(tensor[0], broadcast_options.root_rank).wait()

    def allreduce(self, tensor: list[torch.Tensor], allreduce_options: AllReduceOptions = AllReduceOptions()) -> None:  # noqa: B008
        options: Any = dist.AllreduceOptions()
        options.reduceOp = _REDUCE_OPS[allreduce_options.reduceOp]
        self._start(lambda pg: pg.allreduce(tensor, options), "allreduce").wait()

    def barrier(self, barrier_options: BarrierOptions = BarrierOptions()) -> None:  # noqa: B008
        self.allreduce([torch.zeros(1, device="cuda" if self.transport == "nccl" else "cpu")])

    def reduce(self, *_: Any) -> None:
        raise NotImplementedError("RL_ACTORS groups move weights: broadcast, send, recv, allreduce and barrier only")

    allgather = reducescatter = reduce

    def abort(self, reason: str) -> None:
        """End this member's waits, and tell the others."""
        if self._aborted is None:
            self._aborted = reason
            # The driver sees the error itself; a KV that is gone must not hide it.
            with contextlib.suppress(Exception):
                abort_group(self._group_name, reason)
            if self.transport == "nccl" and self._process_group is not None:
                self._process_group.abort()

    def destroy_group(self) -> None:
        """Called by ray.util.collective when the group is left."""
        if self._process_group is not None and self._aborted is None:
            self._process_group.shutdown()
        self._process_group = None
        self._store = None

    @property
    def _by_host(self) -> bool:
        return self.device == "cuda" and self.transport != "nccl"

    def _find_place(self) -> str:
        return ""

    def _start(self, operation: Callable[[Any], Any], what: str) -> Pending:
        if self._aborted is not None or self._process_group is None:
            raise SyncError(f"group {self._group_name!r} is closed: {self._aborted or 'this process has left it'}")
        try:
            return Pending(self, operation(self._process_group), what)
        except RuntimeError as error:
            raise self._failed(what, str(error)) from error

    def _wait(self, work: Any, what: str) -> None:
        watch = watch_nccl if self.transport == "nccl" else watch_gloo
        deadline = time.monotonic() + self.timeout_s
        next_poll = time.monotonic() + ABORT_POLL_S
        try:
            for finished in watch(work, self.timeout_s):
                if finished:
                    return
                now = time.monotonic()
                if self._aborted is None and now >= next_poll:
                    self._aborted = _kv_get(_abort_key(self._group_name))
                    next_poll = now + ABORT_POLL_S
                if self._aborted is not None:
                    raise SyncError(f"{what} was stopped in group {self._group_name!r}: {self._aborted}")
                if now > deadline:
                    raise self._failed(what, f"no answer within {self.timeout_s:g} s")
        except RuntimeError as error:
            raise self._failed(what, str(error)) from error

    def _failed(self, what: str, why: str) -> SyncError:
        message = f"rank {self._rank} of {self._world_size} failed at {what} in group {self._group_name!r}: {why}"
        self.abort(message)
        return SyncError(message)


def _meet(group_name: str, rank: int, world_size: int, timeout_s: float, place: str) -> dist.TCPStore:
    """The group's store, once every member has reached it and written its place under "here/<rank>"."""
    deadline = time.monotonic() + timeout_s
    timeout = timedelta(seconds=timeout_s)
    if rank == 0:
        host = ray.util.get_node_ip_address()
        store = dist.TCPStore(host, 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        internal_kv._internal_kv_put(group_name, f"{host} {store.port}", overwrite=True, namespace=KV_NAMESPACE)
    else:
        complaint = f"rank 0 did not open group {group_name!r} within {timeout_s:g} s"
        host, port = _poll(group_name, lambda: _kv_get(group_name), deadline, complaint).split()
        store = dist.TCPStore(host, int(port), world_size, is_master=False, timeout=timeout, wait_for_workers=False)
    store.set(f"here/{rank}", place)
    try:
        _poll(group_name, lambda: store.check([f"here/{r}" for r in range(world_size)]), deadline, "late")
    except SyncError as error:
        if "late" not in error.args:
            raise
        missing = [r for r in range(world_size) if not store.check([f"here/{r}"])]
        if rank == 0:
            time.sleep(1.0)  # the store is in this process: let the others ask it the same question
        raise SyncError(f"group {group_name!r}: ranks {missing} did not join within {timeout_s:g} s") from None
    except RuntimeError as error:
        raise SyncError(f"group {group_name!r}: rank 0, which holds its store, is gone") from error
    if rank == 0:
        internal_kv._internal_kv_del(group_name, namespace=KV_NAMESPACE)
    return store


def _poll(group_name: str, ask: Callable[[], Any], deadline: float, complaint: str) -> Any:
    """The first true answer. Joining ends on an abort as well."""
    while not (answer := ask()):
        if time.monotonic() > deadline:
            raise SyncError(complaint)
        if reason := _kv_get(_abort_key(group_name)):
            raise SyncError(f"joining group {group_name!r} was stopped: {reason}")
        time.sleep(0.02)
    return answer


def _kv_get(key: str) -> str | None:
    value = internal_kv._internal_kv_get(key, namespace=KV_NAMESPACE)
    return None if value is None else value.decode()


def _abort_key(group_name: str) -> str:
    return f"abort/{group_name}"


def _pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=True)
