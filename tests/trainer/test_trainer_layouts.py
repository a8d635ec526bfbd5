"""Layout does not change the model: every layout against Hugging Face and against world size 1, in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tasks
from rank_process import RankProcesses, with_layout
from tiny_models import huggingface_logprobs, make_batch

LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2": {"replicas": 2},
    "tp2-dp2": {"tp": 2, "replicas": 2},
    "ep2": {"ep": 2},
    "ep2-pp2": {"ep": 2, "pp": 2},
    "tp2-pp2-ep2": {"tp": 2, "pp": 2, "ep": 2},
    "ep4": {"ep": 4},
}
DENSE = ["one", "tp2", "pp2", "dp2", "tp2-dp2"]
CASES = [
    *[("dense", layout) for layout in DENSE],
    *[("tied", layout) for layout in ("one", "pp2")],
    *[("odd", layout) for layout in ("one", "tp2")],  # 97 tokens: the vocabulary is padded at TP2
    *[("moe", layout) for layout in LAYOUTS],
    *[("moe_tied", layout) for layout in ("one", "tp2-pp2-ep2")],
]
BATCH = make_batch(12)


@pytest.fixture(scope="module")
def runs(rank_processes: RankProcesses, tiny_config: Any) -> Any:
    """`runs(model, layout)`: one update there, made once."""
    made: dict[tuple[str, str], dict[str, Any]] = {}

    def run(model: str, layout: str) -> dict[str, Any]:
        if (model, layout) not in made:
            answers = rank_processes.run(tasks.train_once, with_layout(tiny_config(model), **LAYOUTS[layout]), BATCH)
            assert all(answer["metrics"] == answers[0]["metrics"] for answer in answers), "metrics differ between ranks"
            gradients = {name: value for answer in answers for name, value in answer["gradients"].items()}
            made[model, layout] = {**answers[0], "gradients": gradients}
        return made[model, layout]

    return run


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_logprobs_equal_transformers(runs: Any, tiny_config: Any, model: str, layout: str) -> None:
    oracle = huggingface_logprobs(tiny_config(model).model.path, BATCH, 0.7)
    assert np.abs(runs(model, layout)["logprobs"] - oracle).max() < 1e-5


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_step_zero_is_the_base_exactly(runs: Any, model: str, layout: str) -> None:
    run = runs(model, layout)
    np.testing.assert_array_equal(run["logprobs"], run["base"])


@pytest.mark.parametrize(("model", "layout"), [case for case in CASES if case[1] != "one"])
def test_update_equals_world_size_one(runs: Any, model: str, layout: str) -> None:
    one, run = runs(model, "one"), runs(model, layout)
    assert run["gradients"].keys() == one["gradients"].keys()
    for name, expected in one["gradients"].items():
        # A is behind B = 0, so its gradient is zero at the first step, exactly.
        difference = np.linalg.norm(run["gradients"][name] - expected)
        assert difference <= 1e-5 * np.linalg.norm(expected), name
    assert run["metrics"].keys() == one["metrics"].keys()
    for name, value in one["metrics"].items():
        assert run["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize("model", ["dense", "tied", "moe"])
def test_update_equals_that_with_whole_logits(
    runs: Any, rank_processes: RankProcesses, tiny_config: Any, model: str
) -> None:
    one = runs(model, "one")
    (plain,) = rank_processes.run(tasks.train_with_whole_logits, tiny_config(model), BATCH)
    np.testing.assert_allclose(one["logprobs"], plain["logprobs"], atol=5e-6)
    for name, expected in plain["gradients"].items():
        assert np.linalg.norm(one["gradients"][name] - expected) <= 1e-5 * np.linalg.norm(expected), name
    for name, value in plain["metrics"].items():
        assert one["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_every_adapted_layer_type_has_a_gradient(runs: Any, model: str) -> None:
    metrics = runs(model, "one")["metrics"]
    norms = {name: value for name, value in metrics.items() if name.startswith("grad_norm/")}
    experts = "experts." if model == "moe" else ""
    assert set(norms) == {
        "grad_norm/linear_qkv",
        "grad_norm/linear_proj",
        f"grad_norm/{experts}linear_fc1",
        f"grad_norm/{experts}linear_fc2",
    }
    assert all(value > 0 for value in norms.values())
    assert metrics["grad_norm"] == pytest.approx(np.sqrt(sum(value**2 for value in norms.values())))


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_clipping_leaves_the_limit(runs: Any, model: str, layout: str) -> None:
    run = runs(model, layout)
    assert run["metrics"]["grad_norm"] > 0.05
    total = np.sqrt(sum(np.square(value).sum() for value in run["gradients"].values()))
    assert total == pytest.approx(0.05, rel=1e-4)
