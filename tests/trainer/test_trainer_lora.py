"""Adapters by global name: the same in every layout, on the modules that were asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tasks
import torch
from rank_process import RankFailed, RankProcesses, with_layout
from tiny_models import make_batch

from rl_actors.trainer.slices import Slice

BATCH = make_batch(6)
FOUR = {"tp": 2, "pp": 2, "ep": 2}


def test_slices_put_together_give_the_whole() -> None:
    full = torch.arange(48.0).reshape(8, 6)
    for where in ({"axis": 0}, {"axis": 1}, {"axis": 0, "gated": True}):
        shards = [Slice(rank=rank, size=2, **where).of(full) for rank in (0, 1)]
        assert torch.equal(Slice(rank=0, size=2, **where).join(shards), full)
    first = Slice(axis=0, rank=0, size=2, gated=True).of(full)
    assert torch.equal(first, full[[0, 1, 4, 5]]), "a gated shard holds its part of gate and of up"


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_perturbed_adapters_are_the_same_in_every_layout(
    rank_processes: RankProcesses, tiny_config: Any, model: str
) -> None:
    config = tiny_config(model)
    one = rank_processes.run(tasks.perturbed, config, BATCH)[0]
    assert np.abs(one["logprobs"] - one["base"]).max() > 0.1, "the perturbation moves the model"
    for layout in ({"tp": 2, "pp": 2}, {"replicas": 2}, *([FOUR] if model == "moe" else [])):
        answers = rank_processes.run(tasks.perturbed, with_layout(config, **layout), BATCH)
        factors = {name: pair for answer in answers for name, pair in answer["factors"].items()}
        assert factors.keys() == one["factors"].keys()
        for name, (a, b) in one["factors"].items():
            np.testing.assert_array_equal(factors[name][0], a)
            np.testing.assert_array_equal(factors[name][1], b)
        np.testing.assert_allclose(answers[0]["logprobs"], one["logprobs"], atol=2e-5)


@pytest.mark.parametrize(("model", "layout"), [("dense", {"tp": 2, "pp": 2}), ("moe", FOUR)])
def test_local_factors_merge_into_the_local_shard(
    rank_processes: RankProcesses, tiny_config: Any, model: str, layout: dict[str, int]
) -> None:
    answer = rank_processes.run(tasks.merged_forward, with_layout(tiny_config(model), **layout), BATCH)[0]
    np.testing.assert_allclose(answer["merged"], answer["adapted"], atol=2e-5)


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
    config = tiny_config("dense", lora={"targets": ("linear_qvk",)})
    with pytest.raises(RankFailed, match=r"ConfigError: lora.targets: 'linear_qvk' matches no module.*linear_qkv"):
        rank_processes.run(tasks.adapter_names, with_layout(config, pp=2))


def test_a_rank_that_tp_does_not_divide_is_named(rank_processes: RankProcesses, tiny_config: Any) -> None:
    with pytest.raises(RankFailed, match=r"ConfigError: lora.rank = 3 is not a multiple of trainer.tp = 2"):
        rank_processes.run(tasks.adapter_names, with_layout(tiny_config("dense", lora={"rank": 3}), tp=2))
