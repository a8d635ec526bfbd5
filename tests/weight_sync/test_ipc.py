"""Memory is handed over, acknowledged after the copy, and no wait outlives a timeout, an abort or a peer.

On CPU the memory is shared memory. Only the export and the mapping of a handle differ on a GPU.
"""

import os
import time
from pathlib import Path

import pytest
import ray
import torch

from rl_actors.errors import ConfigError, SyncError
from rl_actors.weight_sync.transport import choose_transport

MESSAGE_BYTES = 4096


@ray.remote(num_cpus=0, max_concurrency=3)
class Member:
    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        self.rank = rank
        self.pending = []

    def join(
        self, name: str, timeout_s: float, gpu: str | None = None, node: str | None = None, transport: str = "cuda_ipc"
    ) -> list[str]:
        """Returns the links. `gpu` and `node` pretend that the memory is elsewhere."""
        from rl_actors.weight_sync.collective import join_group

        here = node or ray.get_runtime_context().get_node_id()
        place = f"{here}/{gpu or 'cpu'}"
        self.group = join_group(name, self.rank, 2, "cpu", timeout_s, transport, place)
        self.buffer = self.group.allocate(2 * MESSAGE_BYTES)
        return [self.group.link(rank) for rank in range(2)]

    def leave(self, name: str) -> None:
        from rl_actors.weight_sync.collective import leave_group

        leave_group(name)

    def send(self, value: int, half: int = 0) -> None:
        """Fill one half of the buffer and announce it under the tag `half`."""
        message = self.buffer[half * MESSAGE_BYTES :][:MESSAGE_BYTES].fill_(value)
        self.pending.append(self.group.isend(message, 1, half))

    def wait(self) -> float:
        """Seconds until all that was sent is acknowledged."""
        started = time.monotonic()
        while self.pending:
            self.pending.pop(0).wait()
        return time.monotonic() - started

    def receive(self, half: int = 0, nbytes: int = MESSAGE_BYTES) -> set[int]:
        """The values that came."""
        target = torch.zeros(nbytes // 4, dtype=torch.int32)
        self.group.irecv(target, 0, half).wait()
        return set(target.view(torch.uint8).tolist())

    def fail(self, method: str, *arguments: int) -> tuple[float, str]:
        """Seconds until a method failed, and why."""
        started = time.monotonic()
        with pytest.raises(SyncError) as caught:
            getattr(self, method)(*arguments)
        self.pending.clear()
        return time.monotonic() - started, str(caught.value)

    def handles(self) -> int:
        """That this member has sent, or mapped."""
        return len(self.group._handles) + len(self.group._mapped)

    def hide_shared_memory(self) -> None:
        """Others find an empty file where the buffer's was."""
        from rl_actors.weight_sync import ipc_memory

        with Path(os.devnull).open("rb") as empty:
            os.dup2(empty.fileno(), ipc_memory._files[self.buffer.data_ptr()])

    def put_a_file_in_its_place(self, path: str) -> None:
        """The buffer's file is gone, and its number another file's."""
        from rl_actors.weight_sync import ipc_memory

        with Path(path).open("r+b") as other:
            os.dup2(other.fileno(), ipc_memory._files[self.buffer.data_ptr()])

    def die(self) -> None:
        os.kill(os.getpid(), 9)


@pytest.fixture(scope="module")
def pair():
    """A sender and a receiver; the last test kills the receiver."""
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield [Member.remote(rank) for rank in range(2)]
    ray.shutdown()


def meet(pair, name, timeout_s=20.0, places=({}, {})):
    return ray.get(
        [member.join.remote(name, timeout_s, **place) for member, place in zip(pair, places, strict=True)], timeout=60
    )


def part(pair, name):
    ray.get([member.leave.remote(name) for member in pair], timeout=60)


def taken(sender, receiver) -> set[int]:
    """What came, while the sender waits: without memory to map, both sides have something to do."""
    received, _ = ray.get([receiver.receive.remote(), sender.wait.remote()], timeout=60)
    return received


def test_a_buffer_is_mapped_once_and_reused_after_the_acknowledgement(pair):
    sender, receiver = pair
    assert meet(pair, "reused")[0][1] == "cuda_ipc on one GPU"
    for value in (1, 2, 3):
        for half in (0, 1):
            ray.get(sender.send.remote(10 * value + half, half), timeout=60)
        for half in (1, 0):
            assert ray.get(receiver.receive.remote(half), timeout=60) == {10 * value + half}
        ray.get(sender.wait.remote(), timeout=60)
    assert ray.get([sender.handles.remote(), receiver.handles.remote()], timeout=60) == [1, 1]
    part(pair, "reused")


def test_the_sender_waits_for_the_copy_and_not_for_the_notice(pair):
    sender, receiver = pair
    meet(pair, "acknowledged")
    ray.get(sender.send.remote(7), timeout=60)
    wait = sender.wait.remote()
    ready, _ = ray.wait([wait], timeout=1.0)
    assert not ready
    assert ray.get(receiver.receive.remote(), timeout=60) == {7}
    assert ray.get(wait, timeout=10) >= 0.9
    part(pair, "acknowledged")


GPU_A, GPU_B, GPU_ELSEWHERE = {"gpu": "GPU-a"}, {"gpu": "GPU-b"}, {"gpu": "GPU-a", "node": "elsewhere"}
CPU, CPU_ELSEWHERE = {"transport": "shared_memory"}, {"transport": "shared_memory", "node": "elsewhere"}


@pytest.mark.parametrize(
    ("places", "link", "handles"),
    [
        ((GPU_A, GPU_B), "cuda_ipc between GPUs of a node", 1),
        ((GPU_A, GPU_ELSEWHERE), "gloo through host memory", 0),
        ((CPU, CPU), "shared memory", 1),
        ((CPU, CPU_ELSEWHERE), "gloo", 0),
    ],
)
def test_members_take_the_way_that_their_places_allow(pair, places, link, handles):
    sender, receiver = pair
    assert meet(pair, link, places=places)[0][1] == link
    for value in (5, 6):
        ray.get(sender.send.remote(value), timeout=60)
        assert ray.get(receiver.receive.remote(), timeout=60) == {value}
        ray.get(sender.wait.remote(), timeout=60)
    assert ray.get(receiver.handles.remote(), timeout=60) == handles
    part(pair, link)


@pytest.mark.parametrize("places", [(GPU_A, GPU_B), (CPU, CPU)], ids=["another GPU", "CPU"])
def test_memory_that_cannot_be_mapped_is_sent_instead(pair, places):
    sender, receiver = pair
    name = f"unmappable {places[0]}"
    meet(pair, name, places=places)
    ray.get(sender.hide_shared_memory.remote(), timeout=60)
    for value in (5, 6):
        ray.get(sender.send.remote(value), timeout=60)
        assert taken(sender, receiver) == {value}
    assert ray.get(receiver.handles.remote(), timeout=60) == 0
    part(pair, name)


def test_another_file_behind_the_number_is_neither_read_nor_changed(pair, tmp_path):
    sender, receiver = pair
    (tmp_path / "rows.jsonl").write_text("{}")
    meet(pair, "replaced", places=(CPU, CPU))
    ray.get(sender.send.remote(5), timeout=60)
    ray.get(sender.put_a_file_in_its_place.remote(str(tmp_path / "rows.jsonl")), timeout=60)
    assert taken(sender, receiver) == {5}, "sent instead"
    assert (tmp_path / "rows.jsonl").read_text() == "{}"
    part(pair, "replaced")


def test_memory_of_the_same_gpu_that_cannot_be_mapped_ends_both_sides(pair):
    sender, receiver = pair
    meet(pair, "broken")
    ray.get(sender.send.remote(5), timeout=60)
    ray.get(sender.hide_shared_memory.remote(), timeout=60)
    ends = ray.get([sender.fail.remote("wait"), receiver.fail.remote("receive")], timeout=60)
    assert all(seconds < 10 and "reading memory of rank 0" in why for seconds, why in ends)
    part(pair, "broken")


def test_a_message_of_another_size_is_refused(pair):
    sender, receiver = pair
    meet(pair, "size")
    ray.get(sender.send.remote(5), timeout=60)
    ends = ray.get([sender.fail.remote("wait"), receiver.fail.remote("receive", 0, 64)], timeout=60)
    assert all("4096 bytes came, 64 were expected" in why for _, why in ends)
    part(pair, "size")


def test_silence_ends_at_the_timeout_and_the_driver_can_abort_earlier(pair):
    from rl_actors.weight_sync.collective import abort_group

    sender, receiver = pair
    meet(pair, "silent", timeout_s=2.0)
    ray.get(sender.send.remote(5), timeout=60)
    assert 1.5 < ray.get(sender.fail.remote("wait"), timeout=30)[0] < 6.0
    part(pair, "silent")
    meet(pair, "aborted", timeout_s=60.0)
    ray.get(sender.send.remote(5), timeout=60)
    ends = [sender.fail.remote("wait"), receiver.fail.remote("receive", 1)]
    abort_group("aborted", "the driver says so")
    assert all(seconds < 8 and "the driver says so" in why for seconds, why in ray.get(ends, timeout=30))
    part(pair, "aborted")


def test_a_receiver_that_dies_frees_the_sender(pair):
    sender, receiver = pair
    meet(pair, "killed", timeout_s=60.0)
    ray.get(sender.send.remote(5), timeout=60)
    end = sender.fail.remote("wait")
    receiver.die.remote()
    assert ray.get(end, timeout=30)[0] < 15.0


@pytest.mark.parametrize(
    ("wanted", "device", "colocate", "transport"),
    [
        ("auto", "cpu", True, "shared_memory"),
        ("gloo", "cpu", False, "gloo"),
        ("auto", "cuda", False, "nccl"),
        ("auto", "cuda", True, "cuda_ipc"),
        ("gloo", "cuda", True, "gloo"),
        ("cuda_ipc", "cuda", False, "cuda_ipc"),
    ],
)
def test_the_transport_follows_the_placement(wanted, device, colocate, transport):
    assert choose_transport(wanted, device, colocate) == transport


@pytest.mark.parametrize(
    ("wanted", "device", "colocate", "why"),
    [
        ("nccl", "cpu", False, "needs GPUs: write 'auto' or 'shared_memory'"),
        ("cuda_ipc", "cpu", False, "needs GPUs: write 'auto' or 'shared_memory'"),
        ("nccl", "cuda", True, "two members on one GPU"),
        ("shared_memory", "cuda", False, "for CPU processes: write 'auto' or 'nccl'"),
    ],
)
def test_a_transport_is_refused_where_it_cannot_work(wanted, device, colocate, why):
    with pytest.raises(ConfigError, match=f"sync.transport = '{wanted}' .*{why}"):
        choose_transport(wanted, device, colocate)
