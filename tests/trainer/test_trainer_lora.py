"""Adapters by global name: the same in every layout, on the modules that were asked for."""

from __future__ import annotations

from typing import Any

import pytest
import tasks
import torch
from rank_process import RankFailed, RankProcesses, with_layout
from tiny_models import make_batch

from rl_actors.trainer.slices import Slice

BATCH = make_batch(6)


def test_slices_put_together_give_the_whole() -> None:
    full = torch.arange(48.0).reshape(8, 6)
    for where in ({"axis": 0}, {"axis": 1}, {"axis": 0, "gated": True}):
        shards = [Slice(rank=rank, size=2, **where).of(full) for rank in (0, 1)]
        assert torch.equal(Slice(rank=0, size=2, **where).join(shards), full)
    first = Slice(axis=0, rank=0, size=2, gated=True).of(full)
    assert torch.equal(first, full[[0, 1, 4, 5]]), "a gated shard holds its part of gate and of up"


def test_wildcards_count_layers_of_the_whole_model(rank_processes: RankProcesses, tiny_config: Any) -> None:
    config = tiny_config(
        "dense", lora={"targets": ("*.layers.1.*.linear_qkv", "linear_proj"), "exclude": ("*.0.*_proj",)}
    )
    wanted = {"layers.1.self_attention.linear_qkv", "layers.1.self_attention.linear_proj"}
    for layout in ({}, {"pp": 2}):
        answers = rank_processes.run(tasks.adapter_names, with_layout(config, **layout))
        assert {name for names in answers for name in names} == wanted


def test_a_first_stage_without_adapters_trains(rank_processes: RankProcesses, tiny_config: Any) -> None:
    config = tiny_config("dense", lora={"targets": ("*.layers.1.*.linear_qkv",)})
    one = rank_processes.run(tasks.train_once, config, BATCH)[0]
    two = rank_processes.run(tasks.train_once, with_layout(config, pp=2), BATCH)
    assert two[0]["metrics"]["grad_norm"] == pytest.approx(one["metrics"]["grad_norm"], rel=1e-5)


def test_a_target_that_matches_nothing_is_named(rank_processes: RankProcesses, tiny_config: Any) -> None:
    config = tiny_config("dense", lora={"targets": ("*.linear_qvk",)})
    with pytest.raises(RankFailed, match=r"ConfigError: lora.targets: '\*\.linear_qvk' matches no module.*linear_qkv"):
        rank_processes.run(tasks.adapter_names, with_layout(config, pp=2))


def test_a_rank_that_tp_does_not_divide_is_named(rank_processes: RankProcesses, tiny_config: Any) -> None:
    with pytest.raises(RankFailed, match=r"ConfigError: lora.rank = 3 is not a multiple of trainer.tp = 2"):
        rank_processes.run(tasks.adapter_names, with_layout(tiny_config("dense", lora={"rank": 3}), tp=2))
