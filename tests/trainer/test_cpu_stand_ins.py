"""The CPU stand-ins change devices, not meanings. Run in rank processes, so that no other test sees them."""

from __future__ import annotations

from typing import Any

import pytest
import tasks
from rank_process import RankProcesses, with_layout


@pytest.fixture(scope="module")
def seen(rank_processes: RankProcesses, tiny_config: Any) -> list[dict[str, Any]]:
    return rank_processes.run(tasks.look_at_stand_ins, with_layout(tiny_config("dense"), tp=2))


def test_cuda_literals_mean_cpu(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["literal"] == "cpu"
    assert seen[0]["type"] == "torch.cuda.FloatTensor"


def test_device_contexts_still_work(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["context"] == "meta"


def test_a_second_install_changes_nothing(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["idempotent"]


def test_forked_generators_differ_between_tensor_parallel_ranks(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["forked"] != seen[1]["forked"]
    assert all(rank["undisturbed"] for rank in seen), "the outer generator goes on as if nothing had been drawn"


def test_hidden_packages_can_be_imported_afterwards(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["hidden"] == []
