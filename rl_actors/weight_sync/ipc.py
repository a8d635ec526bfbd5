"""A collective group whose members hand each other memory instead of sending bytes.

It is for trainer ranks and engine workers that share GPUs, where NCCL refuses (it takes one rank for each GPU), and for
CPU processes of one node.

    sender: pack -> stream synchronised -> "buffer 1, bytes 0 to n"       wait() returns, buffer is free
    receiver:                                  map once, read, synchronise -> "read"

Notices and acknowledgements are small gloo messages, so timeouts, aborts and lost peers end a wait as in any group.
Each pair takes the best way there is: shared memory of a node's CPU processes; one GPU; two GPUs of a node, mapped
through peer access; otherwise, between nodes or where mapping fails, gloo, from a GPU through pinned host memory.

Invariant: a sender's wait ends only after the receiver's reading is complete on its device.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rl_actors.weight_sync import ipc_memory
from rl_actors.weight_sync.collective import IPC_BACKEND, Arrival, CollectiveGroup, Pending
from rl_actors.weight_sync.ipc_memory import Handle

log = logging.getLogger(__name__)

NOTICE_BYTES = 2048
"""A notice is padded to this size: gloo's receiver must know it beforehand. A CUDA handle takes about 600."""
READ, UNMAPPABLE = 1, 2
NOTICE, ANSWER, BYTES, TAGS = 0, 1, 2, 3
"""The three kinds of gloo messages of one of ours, on tags of their own."""

ONE_DEVICE, ONE_NODE, HOST = "cuda_ipc on one GPU", "cuda_ipc between GPUs of a node", "gloo through host memory"
SHARED, NETWORK = "shared memory", "gloo"


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
        (node, device), (other_node, other_device) = (one.split("/") for one in (self.place, self._places[rank]))
        if self.transport == "shared_memory":
            return SHARED if node == other_node else NETWORK
        if node != other_node:
            return HOST
        return ONE_DEVICE if device == other_device else ONE_NODE

    def allocate(self, nbytes: int) -> torch.Tensor:
        return ipc_memory.allocate(nbytes, self.device)

    def isend(self, tensor: torch.Tensor, receiver: int, tag: int = 0) -> Pending:
        """Tell the receiver that `tensor`, a part of an `allocate`d buffer, may be copied."""
        what = f"handing memory to rank {receiver}"
        if not self._maps(receiver):
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
        return _Taking(self.expect(tensor.nbytes, sender, tag, []), tensor)

    def expect(self, nbytes: int, sender: int, tag: int, spare: list[torch.Tensor]) -> Arrival:
        """Expect a message; its bytes are the sender's own memory if that can be mapped."""
        if not self._maps(sender):
            return self._expect_bytes(nbytes, sender, tag, spare)
        notice = torch.zeros(NOTICE_BYTES, dtype=torch.uint8)
        arriving = self._start(
            lambda pg: pg.recv([notice], sender, tag * TAGS + NOTICE), f"waiting for memory of rank {sender}"
        )
        return _Lent(self, arriving, notice, nbytes, sender, tag, spare)

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

    def _maps(self, rank: int) -> bool:
        return self.link(rank) not in (HOST, NETWORK)

    def _expect_bytes(self, nbytes: int, sender: int, tag: int, spare: list[torch.Tensor]) -> Arrival:
        return super().expect(nbytes, sender, tag * TAGS + BYTES, spare)

    def _answer(self, answer: int, sender: int, tag: int) -> None:
        message = torch.tensor([answer], dtype=torch.uint8)
        what = f"answering rank {sender}"
        self._start(lambda pg: pg.send([message], sender, tag * TAGS + ANSWER), what).wait()

    def _read(self, notice: Notice, nbytes: int, sender: int) -> torch.Tensor | None:
        """The message in the sender's memory; None if that cannot be mapped."""
        what = f"reading memory of rank {sender}"
        if notice.nbytes != nbytes:
            raise self._failed(what, f"{notice.nbytes} bytes came, {nbytes} were expected")
        try:
            source = self._map(notice, sender)
        except (RuntimeError, OSError) as error:
            raise self._failed(what, str(error)) from error
        return None if source is None else source[notice.offset : notice.offset + nbytes]

    def _map(self, notice: Notice, sender: int) -> torch.Tensor | None:
        """The sender's buffer; None if it cannot be mapped. Raises RuntimeError if it lies on this very GPU."""
        if sender in self._unmappable:
            return None
        key = (sender, notice.buffer)
        if key not in self._mapped:
            try:
                self._mapped[key] = ipc_memory.open_handle(notice.handle, self.device)
            except (RuntimeError, OSError) as error:
                if self.link(sender) == ONE_DEVICE:
                    raise
                log.warning("memory of rank %d cannot be mapped and comes over gloo: %s", sender, error)
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


class _Lent(Arrival):
    """A message in the sender's memory. If that cannot be mapped, the bytes are asked for, and come into a buffer."""

    def __init__(
        self,
        group: IpcGroup,
        arriving: Pending,
        notice: torch.Tensor,
        nbytes: int,
        sender: int,
        tag: int,
        spare: list[torch.Tensor],
    ) -> None:
        self._group, self._arriving, self._notice, self._nbytes = group, arriving, notice, nbytes
        self._sender, self._tag, self._spare = sender, tag, spare
        self._sent_instead: Arrival | None = None

    def wait(self) -> torch.Tensor:
        self._arriving.wait()
        message = self._group._read(_from_bytes(self._notice), self._nbytes, self._sender)
        if message is not None:
            return message
        self._group._answer(UNMAPPABLE, self._sender, self._tag)
        self._sent_instead = self._group._expect_bytes(self._nbytes, self._sender, self._tag, self._spare)
        return self._sent_instead.wait()

    def release(self) -> None:
        if self._sent_instead is not None:
            self._sent_instead.release()
            return
        try:
            ipc_memory.finish(self._group.device)
        except RuntimeError as error:
            raise self._group._failed(f"reading memory of rank {self._sender}", str(error)) from error
        self._group._answer(READ, self._sender, self._tag)


class _Taking(Pending):
    """Done when the message is copied and the sender knows."""

    def __init__(self, arrival: Arrival, target: torch.Tensor) -> None:
        self._arrival, self._target = arrival, target

    def wait(self) -> None:
        message = self._arrival.wait()
        self._target.copy_(message.view(self._target.dtype).view(self._target.shape))
        self._arrival.release()


def _to_bytes(notice: Notice) -> torch.Tensor:
    data = pickle.dumps(notice)
    if len(data) > NOTICE_BYTES:
        raise RuntimeError(f"a handle of {len(data)} bytes does not fit into a notice")
    return torch.frombuffer(bytearray(data.ljust(NOTICE_BYTES, b"\0")), dtype=torch.uint8)


def _from_bytes(message: torch.Tensor) -> Notice:
    return pickle.loads(message.numpy().tobytes())
