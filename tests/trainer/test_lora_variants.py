"""Canonical LoRA, DoRA, rsLoRA and LoRA+: grouped experts, checkpoints, names and scales, in float32.

What a variant computes, in every kind of layout, is held by tests/oracle.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoint_tasks
import numpy as np
import pytest
import tasks
import torch
from rank_process import RankFailed, RankProcesses, with_layout
from tiny_models import huggingface_logprobs, make_batch

from rl_actors.trainer.export import export_merged
from rl_actors.trainer.pool import merge_logprobs
from rl_actors.trainer.shard_files import KINDS, ShardReader

BATCH = make_batch(8)
VARIANTS = {
    "canonical": {"variant": "canonical_lora"},
    "dora": {"variant": "dora"},
    "canonical rslora": {"variant": "canonical_lora", "scaling": "rslora", "normalize_moe_lora": True},
}


def test_merged_weights_compute_what_the_adapted_model_does_beside_biases(
    rank_processes: RankProcesses, tiny_config: Any
) -> None:
    config = with_layout(tiny_config("biased", lora=VARIANTS["dora"]), tp=2)
    answer = rank_processes.run(tasks.merged_forward, config, BATCH)[0]
    assert np.abs(answer["adapted"] - answer["base"]).max() > 0.01
    np.testing.assert_allclose(answer["merged"], answer["adapted"], atol=2e-5)


@pytest.mark.parametrize("variant", ["canonical", "dora"])
def test_grouped_experts_compute_their_merged_weights(
    rank_processes: RankProcesses, tiny_config: Any, variant: str
) -> None:
    """GPUs hold a rank's experts in one module; here a plain one stands for Transformer Engine's."""
    config = tiny_config("moe", lora=VARIANTS[variant])
    for name, (found, wanted) in rank_processes.run(tasks.grouped_experts, config)[0].items():
        assert np.linalg.norm(wanted) > 0, name
        np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    ("model", "saved_at", "layout", "variant"),
    [
        ("dense", {"tp": 2, "replicas": 2}, {}, "dora"),
        ("moe", {"tp": 2, "pp": 2, "ep": 2}, {"ep": 2}, "dora"),
        ("moe", {"ep": 2}, {"tp": 2}, "canonical rslora"),
    ],
)
def test_a_run_goes_on_at_another_layout_and_hugging_face_sees_it(
    rank_processes: RankProcesses,
    tiny_config: Any,
    tmp_path: Path,
    model: str,
    saved_at: dict[str, int],
    layout: dict[str, int],
    variant: str,
) -> None:
    config = tiny_config(
        model,
        lora=VARIANTS[variant],
        trainer={"optimizer": {"lr": 5e-3, "schedule": "cosine", "warmup_steps": 1, "lora_plus_ratio": 4}},
        algorithm={"kl_coef": 0.0},
        pipeline={"steps": 6},
    )
    base, saved, again = Path(config.model.path), tmp_path / "saved", tmp_path / "again"
    batch = replace(BATCH, old_logprobs=huggingface_logprobs(base, BATCH, 0.7))
    unbroken = rank_processes.run(
        checkpoint_tasks.train_and_save, with_layout(config, **saved_at), batch, str(saved), 2
    )
    resumed = rank_processes.run(checkpoint_tasks.load_and_go_on, with_layout(config, **layout), batch, str(saved))
    np.testing.assert_allclose(resumed[0]["losses"], unbroken[0]["losses"], atol=1e-5, rtol=0)
    np.testing.assert_allclose(resumed[0]["norms"], unbroken[0]["norms"], rtol=1e-4)

    rank_processes.run(checkpoint_tasks.load_and_save, with_layout(config, **layout), str(saved), str(again))
    first, second = ShardReader(saved), ShardReader(again)
    assert first.state.adapters == second.state.adapters
    for name, entry in first.state.adapters.items():
        for part in entry.keys() - {"scale"}:
            for kind in KINDS:
                assert torch.equal(first.full(name, part, kind), second.full(name, part, kind)), (name, part, kind)

    export_merged(base, saved, tmp_path / "merged")
    trainer = merge_logprobs(batch, [answer["logprobs"] for answer in unbroken])
    assert np.abs(trainer - batch.old_logprobs).max() > 0.01, "training has moved the model"
    np.testing.assert_allclose(huggingface_logprobs(tmp_path / "merged", batch, 0.7), trainer, atol=1e-4, rtol=0)


def test_lora_plus_multiplies_the_steps_of_b_alone(rank_processes: RankProcesses, tiny_config: Any) -> None:
    """At EP2 dense parameters have the distributed optimizer and experts one of their own."""

    def run(ratio: float) -> dict[str, Any]:
        optimizer = {"lr": 0.01, "schedule": "linear", "clip_grad": 0.05, "lora_plus_ratio": ratio}
        config = tiny_config("moe", trainer={"optimizer": optimizer}, algorithm={"kl_coef": 0.0})
        answers = rank_processes.run(tasks.step_changes, with_layout(config, ep=2), BATCH)
        return {**answers[0], "changes": {k: v for answer in answers for k, v in answer["changes"].items()}}

    plain, plus = run(1.0), run(4.0)
    assert plain["lrs"][0] > plain["lrs"][1] > 0 and plus["lrs"] == plain["lrs"]
    assert plain["rates"] == [{lr} for lr in plain["lrs"]]
    assert plus["rates"] == [{lr, 4 * lr} for lr in plain["lrs"]]
    for name, change in plain["changes"].items():
        assert np.abs(change).max() > 0.005
        ratio = 4.0 if name.endswith(".B") else 1.0
        np.testing.assert_allclose(plus["changes"][name], ratio * change, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("scaling", "scales"), [("standard", (2.0, 4.0)), ("rslora", (4.0, 8 / math.sqrt(2)))])
def test_ranks_and_scales(
    rank_processes: RankProcesses, tiny_config: Any, scaling: str, scales: tuple[float, float]
) -> None:
    """Rank 4 and alpha 8; experts have half the rank, since a token visits two."""
    config = tiny_config("moe", lora={"scaling": scaling, "normalize_moe_lora": True})
    found = rank_processes.run(tasks.adapter_scales, config)[0]
    assert found["linear_qkv"] == found["linear_proj"] == (scales[0], 4)
    assert found["experts.linear_fc1"] == found["experts.linear_fc2"] == (pytest.approx(scales[1]), 2)


def test_parts_are_chosen_by_name_layer_and_exclusion(rank_processes: RankProcesses, tiny_config: Any) -> None:
    targets = ("linear_q", "*.layers.1.*.linear_v", "*.mlp.experts.*.linear_fc1_up")
    config = tiny_config("moe", lora={"variant": "canonical_lora", "targets": targets, "exclude": ("*.0.*_q",)})
    answers = rank_processes.run(tasks.adapter_names, with_layout(config, pp=2))
    names = {name for answer in answers for name in answer}
    experts = {f"layers.{layer}.mlp.experts.{e}.linear_fc1_up" for layer in (0, 1) for e in range(4)}
    assert names == {"layers.1.self_attention.linear_q", "layers.1.self_attention.linear_v", *experts}


def test_a_part_that_matches_nothing_is_named(rank_processes: RankProcesses, tiny_config: Any) -> None:
    config = tiny_config("dense", lora={"variant": "canonical_lora", "targets": ("*.linear_kk",)})
    with pytest.raises(RankFailed, match=r"ConfigError: lora.targets: '\*\.linear_kk' matches no module.*linear_k\b"):
        rank_processes.run(tasks.adapter_names, config)
