"""Members meet beside an existing default group, data arrives, and a dead or stuck peer never holds the others."""

import os
import time

import pytest
import ray
import torch

from rl_actors.errors import SyncError

TIMEOUT_S = 8.0


@ray.remote(num_cpus=0, max_concurrency=2)
class Member:
    """One process that owns a torch default group of its own, as Megatron and vLLM do."""

    def __init__(self, rank: int, world_size: int, port_file: str) -> None:
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{port_file}", rank=rank, world_size=world_size
        )
        self.rank, self.world_size = rank, world_size

    def join(self, name: str, world_size: int | None = None, timeout_s: float = TIMEOUT_S) -> None:
        from rl_actors.weight_sync.collective import join_group

        self.group = join_group(name, self.rank, world_size or self.world_size, "cpu", timeout_s)

    def leave(self, name: str) -> None:
        from rl_actors.weight_sync.collective import leave_group

        leave_group(name)

    def exchange(self, name: str) -> dict[str, list[float]]:
        """Each operation once through Ray's own functions."""
        import ray.util.collective as collective

        results = {}
        broadcast = torch.full((3,), float(self.rank))
        collective.broadcast(broadcast, src_rank=1, group_name=name)
        results["broadcast"] = broadcast.tolist()
        summed = torch.full((2,), float(self.rank + 1))
        collective.allreduce(summed, group_name=name)
        results["allreduce"] = summed.tolist()
        moved = torch.full((4,), 10.0 + self.rank)
        if self.rank == 0:
            collective.send(moved, 2, group_name=name)
        elif self.rank == 2:
            collective.recv(moved, 0, group_name=name)
        results["moved"] = moved.tolist()
        collective.barrier(group_name=name)
        default = torch.ones(1)
        torch.distributed.all_reduce(default)
        results["default group"] = default.tolist()
        return results

    def receive(self, sender: int) -> float:
        """Seconds until the wait for a message that never comes has failed."""
        start = time.monotonic()
        with pytest.raises(SyncError):
            self.group.irecv(torch.zeros(4), sender).wait()
        return time.monotonic() - start

    def die(self) -> None:
        os.kill(os.getpid(), 9)


@pytest.fixture(scope="module")
def members(tmp_path_factory):
    """Three processes shared by all tests; the last test kills one of them."""
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    rendezvous = str(tmp_path_factory.mktemp("members") / "default_group")
    yield [Member.remote(rank, 3, rendezvous) for rank in range(3)]
    ray.shutdown()


def test_data_arrives_beside_a_default_group_and_a_group_can_be_rebuilt(members):
    for name in ("first", "second"):
        ray.get([member.join.remote(name) for member in members], timeout=60)
        results = ray.get([member.exchange.remote(name) for member in members], timeout=60)
        assert [r["broadcast"] for r in results] == [[1.0] * 3] * 3
        assert [r["allreduce"] for r in results] == [[6.0] * 2] * 3
        assert [r["moved"][0] for r in results] == [10.0, 11.0, 10.0]
        assert [r["default group"] for r in results] == [[3.0]] * 3
        ray.get([member.leave.remote(name) for member in members], timeout=60)


def test_the_driver_can_abort_a_group_whose_members_are_busy_waiting(members):
    from rl_actors.weight_sync.collective import abort_group

    ray.get([member.join.remote("aborted", timeout_s=60.0) for member in members], timeout=60)
    wait = members[2].receive.remote(1)
    ready, _ = ray.wait([wait], timeout=1.0)
    assert not ready
    abort_group("aborted", "the driver says so")
    assert ray.get(wait, timeout=10) < 8.0


def test_a_silent_peer_is_given_up_at_the_timeout(members):
    ray.get([member.join.remote("silent", timeout_s=2.0) for member in members], timeout=60)
    assert 1.5 < ray.get(members[2].receive.remote(1), timeout=30) < 5.0


def test_a_member_that_does_not_come_is_named(members):
    joins = [member.join.remote("missing", world_size=4, timeout_s=2.0) for member in members]
    for join in joins:
        with pytest.raises(SyncError, match=r"ranks \[3\] did not join within 2 s"):
            ray.get(join, timeout=30)


def test_a_killed_peer_frees_those_who_wait_for_it_and_for_each_other(members):
    ray.get([member.join.remote("killed", timeout_s=60.0) for member in members], timeout=60)
    # Rank 1 waits for rank 0, which dies; rank 2 waits for rank 1, which is alive but will never send.
    waits = [members[1].receive.remote(0), members[2].receive.remote(1)]
    members[0].die.remote()
    assert max(ray.get(waits, timeout=30)) < 15.0, "waits must end long before the group's timeout of 60 s"
