"""Canonical LoRA, DoRA, rsLoRA and LoRA+: step 0, gradients, merging and checkpoints, in float32.

The oracle for a layout is world size 1; for what a variant computes, weights merged by hand, PEFT and transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tasks
from rank_process import RankProcesses, with_layout
from tiny_models import make_batch

BATCH = make_batch(8)
VARIANTS = {
    "canonical": {"variant": "canonical_lora"},
    "dora": {"variant": "dora"},
    "canonical rslora": {"variant": "canonical_lora", "scaling": "rslora", "normalize_moe_lora": True},
}
CASES = [
    ("dense", {"tp": 2}, "canonical"),
    ("dense", {"tp": 2}, "dora"),
    ("moe", {"tp": 2, "ep": 2}, "canonical"),
    ("moe", {"tp": 2, "ep": 2}, "dora"),
    ("moe", {"pp": 2, "ep": 2}, "canonical rslora"),
]
Runs = Callable[[str, dict[str, int], str, Any], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def runs(rank_processes: RankProcesses, tiny_config: Any) -> Runs:
    """`runs(model, layout, variant, task)`: the answers of all ranks, made once."""
    made: dict[str, list[dict[str, Any]]] = {}

    def run(model: str, layout: dict[str, int], variant: str, task: Any) -> list[dict[str, Any]]:
        key = f"{model} {layout} {variant} {task.__name__}"
        if key not in made:
            config = with_layout(tiny_config(model, lora=VARIANTS[variant]), **layout)
            made[key] = rank_processes.run(task, config, BATCH)
        return made[key]

    return run


@pytest.mark.parametrize(("model", "layout", "variant"), CASES)
def test_step_zero_is_the_base_exactly_and_every_kind_has_a_gradient(
    runs: Runs, model: str, layout: dict[str, int], variant: str
) -> None:
    for where in ({}, layout):
        run = runs(model, where, variant, tasks.train_once)[0]
        np.testing.assert_array_equal(run["logprobs"], run["base"])
        norms = {name.removeprefix("grad_norm/"): v for name, v in run["metrics"].items() if "grad_norm/" in name}
        ffn = "experts." if model == "moe" else ""
        fused = variant == "dora"
        attention = ["linear_qkv"] if fused else ["linear_q", "linear_k", "linear_v"]
        first = ["linear_fc1"] if fused else ["linear_fc1_gate", "linear_fc1_up"]
        assert set(norms) == {*attention, "linear_proj", *(ffn + name for name in [*first, "linear_fc2"])}
        assert all(value > 0 for value in norms.values()), norms


@pytest.mark.parametrize(("model", "layout", "variant"), CASES)
def test_gradients_of_perturbed_adapters_equal_world_size_one(
    runs: Runs, model: str, layout: dict[str, int], variant: str
) -> None:
    one, many = runs(model, {}, variant, tasks.train_perturbed)[0], runs(model, layout, variant, tasks.train_perturbed)
    gradients = {name: value for answer in many for name, value in answer["gradients"].items()}
    assert gradients.keys() == one["gradients"].keys()
    assert {name[-1] for name in gradients} == ({"A", "B", "M"} if variant == "dora" else {"A", "B"})
    for name, expected in one["gradients"].items():
        assert np.linalg.norm(expected) > 0, name
        assert np.linalg.norm(gradients[name] - expected) <= 1e-5 * np.linalg.norm(expected), name
    assert many[0]["metrics"]["grad_norm"] == pytest.approx(one["metrics"]["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(("model", "layout", "variant"), [*CASES, ("biased", {"tp": 2}, "dora")])
def test_merged_weights_compute_what_the_adapted_model_does(
    runs: Runs, model: str, layout: dict[str, int], variant: str
) -> None:
    answer = runs(model, layout, variant, tasks.merged_forward)[0]
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
