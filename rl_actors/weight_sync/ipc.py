"""A collective group whose members hand each other memory instead of sending bytes.

It is for trainer ranks and engine workers that share GPUs, where NCCL refuses (it takes one rank for each GPU).

    sender: pack -> stream synchronised -> "buffer 1, bytes 0 to n"       wait() returns, buffer is free
    receiver:                                  map once, copy, synchronise -> "copied"

Notices and acknowledgements are small gloo messages, so timeouts, aborts and lost peers end a wait as in any group.
Each pair takes the best way there is: one GPU; two GPUs of a node, mapped through peer access; otherwise, between nodes
or where mapping fails, gloo and pinned host memory.

Invariant: a sender's wait ends only after the receiver's copy is complete on its device.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rl_actors.weight_sync import ipc_memory
from rl_actors.weight_sync.collective import IPC_BACKEND, CollectiveGroup, Pending
from rl_actors.weight_sync.ipc_memory import Handle

log = logging.getLogger(__name__)

NOTICE_BYTES = 2048
"""A notice is padded to this size: gloo's receiver must know it beforehand. A CUDA handle takes about 600."""
COPIED, UNMAPPABLE = 1, 2
NOTICE, ANSWER, BYTES, TAGS = 0, 1, 2, 3
"""The three kinds of gloo messages of one of ours, on tags of their own."""

ONE_DEVICE, ONE_NODE, HOST = "cuda_ipc on one GPU", "cuda_ipc between GPUs of a node", "gloo through host memory"


@dataclass(frozen=True)
class Notice:
    """`nbytes` from `offset` in a buffer are ready.

    The handle comes with every notice, so that they may be read in any order; the receiver opens it once.
    """

    buffer: int
    offset: int
    nbytes: int
    handle: Handle


class IpcGroup(CollectiveGroup):
    """One member's end. A buffer that was sent from stays allocated until the member leaves: use few of them."""

    keeps_buffers = True

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        assert self._store is not None
        self._places = [self._store.get(f"here/{r}").decode() for r in range(world_size)]
        self._exported: dict[int, tuple[int, torch.Tensor]] = {}
        self._handles: dict[tuple[int, int], Handle] = {}
        self._mapped: dict[tuple[int, int], torch.Tensor] = {}
        self._unmappable: set[int] = set()

    @classmethod
    def backend(cls) -> str:
        return IPC_BACKEND

    def link(self, rank: int) -> str:
        mine, theirs = self.place, self._places[rank]
        if mine == theirs:
            return ONE_DEVICE
        return ONE_NODE if mine.partition("/")[0] == theirs.partition("/")[0] else HOST

    def allocate(self, nbytes: int) -> torch.Tensor:
        return ipc_memory.allocate(nbytes, self.device)

    def isend(self, tensor: torch.Tensor, receiver: int, tag: int = 0) -> Pending:
        """Tell the receiver that `tensor`, a part of an `allocate`d buffer, may be copied."""
        what = f"handing memory to rank {receiver}"
        if self.link(receiver) == HOST:
            return self._isend_bytes(tensor, receiver, tag)
        try:
            ipc_memory.finish(self.device)
            notice = _to_bytes(self._notice(tensor, receiver))
        except RuntimeError as error:
            raise self._failed(what, f"this memory cannot be shared: {error}") from error
        answer = torch.zeros(1, dtype=torch.uint8)
        sending = self._start(lambda pg: pg.send([notice], receiver, tag * TAGS + NOTICE), what)
        answering = self._start(lambda pg: pg.recv([answer], receiver, tag * TAGS + ANSWER), what)
        return _Handing(sending, answering, answer, lambda: self._isend_bytes(tensor, receiver, tag))

    def irecv(self, tensor: torch.Tensor, sender: int, tag: int = 0) -> Pending:
        """Expect a message; it is copied into `tensor` when it is waited for."""
        if self.link(sender) == HOST:
            return super().irecv(tensor, sender, tag * TAGS + BYTES)
        notice = torch.zeros(NOTICE_BYTES, dtype=torch.uint8)
        arriving = self._start(
            lambda pg: pg.recv([notice], sender, tag * TAGS + NOTICE), f"waiting for memory of rank {sender}"
        )
        return _Taking(arriving, lambda: self._take(_from_bytes(notice), tensor, sender, tag))

    def destroy_group(self) -> None:
        for held in (self._exported, self._handles, self._mapped):
            held.clear()
        super().destroy_group()

    def _isend_bytes(self, tensor: torch.Tensor, receiver: int, tag: int) -> Pending:
        return super().isend(tensor, receiver, tag * TAGS + BYTES)

    def _notice(self, tensor: torch.Tensor, receiver: int) -> Notice:
        storage = tensor.untyped_storage()
        # The number is the storage's for as long as the group holds on to it.
        number, _ = self._exported.setdefault(storage._cdata, (len(self._exported), tensor))
        if (number, receiver) not in self._handles:
            self._handles[number, receiver] = ipc_memory.export(tensor)
        offset = tensor.data_ptr() - storage.data_ptr()
        return Notice(number, offset, tensor.nbytes, self._handles[number, receiver])

    def _take(self, notice: Notice, tensor: torch.Tensor, sender: int, tag: int) -> None:
        what = f"copying memory of rank {sender}"
        if notice.nbytes != tensor.nbytes:
            raise self._failed(what, f"{notice.nbytes} bytes came, {tensor.nbytes} were expected")
        try:
            source = self._map(notice, sender)
            if source is not None:
                message = source[notice.offset : notice.offset + notice.nbytes]
                tensor.copy_(message.view(tensor.dtype).view(tensor.shape))
                ipc_memory.finish(self.device)
        except RuntimeError as error:
            raise self._failed(what, str(error)) from error
        answer = torch.tensor([UNMAPPABLE if source is None else COPIED], dtype=torch.uint8)
        self._start(lambda pg: pg.send([answer], sender, tag * TAGS + ANSWER), what).wait()
        if source is None:
            super().irecv(tensor, sender, tag * TAGS + BYTES).wait()

    def _map(self, notice: Notice, sender: int) -> torch.Tensor | None:
        """The sender's buffer; None if it lies on another GPU and that GPU's memory cannot be mapped."""
        if sender in self._unmappable:
            return None
        key = (sender, notice.buffer)
        if key not in self._mapped:
            try:
                self._mapped[key] = ipc_memory.open_handle(notice.handle, self.device)
            except RuntimeError as error:
                if self.link(sender) == ONE_DEVICE:
                    raise
                log.warning("memory of rank %d on another GPU goes through the host: %s", sender, error)
                self._unmappable.add(sender)
                return None
        return self._mapped[key]

    def _find_place(self) -> str:
        return ipc_memory.place(self.device)


class _Handing(Pending):
    """Done when the receiver has answered; if it cannot map our memory, when the bytes have gone by another way."""

    def __init__(
        self, sending: Pending, answering: Pending, answer: torch.Tensor, send_bytes: Callable[[], Pending]
    ) -> None:
        self._sending, self._answering, self._answer, self._send_bytes = sending, answering, answer, send_bytes

    def wait(self) -> None:
        self._answering.wait()
        if int(self._answer) == UNMAPPABLE:
            self._send_bytes().wait()


class _Taking(Pending):
    """Done when the copy is complete and acknowledged."""

    def __init__(self, arriving: Pending, take: Callable[[], None]) -> None:
        self._arriving, self._take = arriving, take

    def wait(self) -> None:
        self._arriving.wait()
        self._take()


def _to_bytes(notice: Notice) -> torch.Tensor:
    data = pickle.dumps(notice)
    if len(data) > NOTICE_BYTES:
        raise RuntimeError(f"a handle of {len(data)} bytes does not fit into a notice")
    return torch.frombuffer(bytearray(data.ljust(NOTICE_BYTES, b"\0")), dtype=torch.uint8)


def _from_bytes(message: torch.Tensor) -> Notice:
    return pickle.loads(message.numpy().tobytes())
