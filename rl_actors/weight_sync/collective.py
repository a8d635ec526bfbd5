"""A Ray collective backend that never touches torch's default process group.

Megatron and vLLM each own a default group in their processes, so trainer ranks and engine workers meet in a group
of its own: a TCPStore found through Ray's internal KV, gloo between CPUs, NCCL between GPUs.

Invariant: nobody waits for ever. Every wait ends with its data, at the group's timeout, or soon after any member
(or the driver) has called `abort_group`, which all members see through Ray's KV. No call into a busy actor is needed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
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

BACKEND = "RL_ACTORS"
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


_settings: dict[str, GroupSettings] = {}


def join_group(group_name: str, rank: int, world_size: int, device: str, timeout_s: float) -> CollectiveGroup:
    """Enter a group from inside a Ray actor or task; returns when all members are in.

    A group name is good for one life of a group: take a new one after an abort.

    Args:
        device: "cpu" (gloo) or "cuda" (NCCL, on the process's current device).
        timeout_s: bound of the joining itself and of every later wait.

    Raises:
        SyncError: somebody did not come, naming the missing ranks.
    """
    register_backend()
    _settings[group_name] = GroupSettings(torch.device(device).type, timeout_s)
    ray_collective.init_collective_group(world_size, rank, cast(Any, BACKEND), group_name)
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
    """Make `RL_ACTORS` known to ray.util.collective in this process."""
    from ray.util.collective.backend_registry import _global_registry

    if not _global_registry.is_registered(BACKEND):
        register_collective_backend(BACKEND, CollectiveGroup)


class Pending:
    """A transfer under way. `wait` returns when the buffer may be reused."""

    def __init__(self, group: CollectiveGroup, work: Any, what: str) -> None:
        self._group, self._work, self._what = group, work, what

    def wait(self) -> None:
        """Raises SyncError at the group's timeout, on a lost peer, or after an abort."""
        self._group._wait(self._work, self._what)


class CollectiveGroup(BaseGroup):
    """One member's end of a group. Tensors must be contiguous and live on the group's device."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        default = GroupSettings("cuda" if torch.cuda.is_available() else "cpu", DEFAULT_TIMEOUT_S)
        settings = _settings.get(group_name, default)
        self.device, self.timeout_s = settings.device, settings.timeout_s
        self._aborted: str | None = None
        self._store: dist.TCPStore | None = _meet(group_name, rank, world_size, self.timeout_s)
        make = _make_nccl if self.device == "cuda" else _make_gloo
        self._process_group: Any = make(self._store, rank, world_size, self.timeout_s)

    @classmethod
    def backend(cls) -> str:
        return BACKEND

    @classmethod
    def check_backend_availability(cls) -> bool:
        return dist.is_available()

    def isend(self, tensor: torch.Tensor, receiver: int, tag: int = 0) -> Pending:
        """Start sending. Messages between two ranks arrive in the order they were started (NCCL ignores tags)."""
        return self._start(lambda pg: pg.send([tensor], receiver, tag), f"sending to rank {receiver}")

    def irecv(self, tensor: torch.Tensor, sender: int, tag: int = 0) -> Pending:
        """Start receiving into `tensor`."""
        return self._start(lambda pg: pg.recv([tensor], sender, tag), f"receiving from rank {sender}")

    def send(self, tensor: list[torch.Tensor], send_options: SendOptions) -> None:
        self.isend(tensor[0], send_options.dst_rank).wait()

    def recv(self, tensor: list[torch.Tensor], recv_options: RecvOptions) -> None:
        self.irecv(tensor[0], recv_options.src_rank).wait()

    def broadcast(self, tensor: list[torch.Tensor], broadcast_options: BroadcastOptions = BroadcastOptions()) -> None:  # noqa: B008
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = broadcast_options.root_rank, 0
        self._start(lambda pg: pg.broadcast(tensor, options), f"broadcast from rank {options.rootRank}").wait()

    def allreduce(self, tensor: list[torch.Tensor], allreduce_options: AllReduceOptions = AllReduceOptions()) -> None:  # noqa: B008
        options: Any = dist.AllreduceOptions()
        options.reduceOp = _REDUCE_OPS[allreduce_options.reduceOp]
        self._start(lambda pg: pg.allreduce(tensor, options), "allreduce").wait()

    def barrier(self, barrier_options: BarrierOptions = BarrierOptions()) -> None:  # noqa: B008
        self.allreduce([torch.zeros(1, device=self.device)])

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
            if self.device == "cuda" and self._process_group is not None:
                self._process_group.abort()

    def destroy_group(self) -> None:
        """Called by ray.util.collective when the group is left."""
        if self._process_group is not None and self._aborted is None:
            self._process_group.shutdown()
        self._process_group = None
        self._store = None

    def _start(self, operation: Callable[[Any], Any], what: str) -> Pending:
        if self._aborted is not None or self._process_group is None:
            raise SyncError(f"group {self._group_name!r} is closed: {self._aborted or 'this process has left it'}")
        try:
            return Pending(self, operation(self._process_group), what)
        except RuntimeError as error:
            raise self._failed(what, str(error)) from error

    def _wait(self, work: Any, what: str) -> None:
        watch = _watch_nccl if self.device == "cuda" else _watch_gloo
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


def _meet(group_name: str, rank: int, world_size: int, timeout_s: float) -> dist.TCPStore:
    """The group's store, once every member has reached it."""
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
    store.set(f"here/{rank}", "1")
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


def _make_gloo(store: dist.TCPStore, rank: int, world_size: int, timeout_s: float) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    # Without a device gloo resolves the host's name, which is the loopback on many machines.
    options._devices = [gloo.create_device(hostname=ray.util.get_node_ip_address())]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 2
    return gloo(dist.PrefixStore("gloo", store), rank, world_size, options)


def _make_nccl(store: dist.TCPStore, rank: int, world_size: int, timeout_s: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    # Ours is the timeout that counts. NCCL's own watchdog ends the whole process, so it comes later and is off.
    options._timeout = timedelta(seconds=10 * timeout_s)
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        return dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, world_size, options)
    finally:
        os.environ.pop(name) if before is None else os.environ.__setitem__(name, before)


def _watch_gloo(work: Any, timeout_s: float) -> Iterator[bool]:
    """Yield False until the work is done, then True.

    Gloo's point-to-point work only knows that it is done when waited for, a wait that times out breaks all of its
    connections, and its abort() does not wake one (torch 2.11). So a thread waits, and is left behind on an abort.
    """
    done = threading.Event()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            errors.append(error)
        done.set()

    threading.Thread(target=wait, daemon=True, name="weight-sync-wait").start()
    while not done.wait(ABORT_POLL_S):
        yield False
    if errors:
        raise errors[0]
    yield True


def _watch_nccl(work: Any, timeout_s: float) -> Iterator[bool]:
    """Yield False until the kernel is done, then True with the current stream ordered behind it."""
    del timeout_s
    while not work.is_completed():
        yield False
        time.sleep(0.0005)
    work.wait()
    yield True
