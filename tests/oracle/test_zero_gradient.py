"""The zero-gradient trap: recompute with a frozen base trains as without, and what is cut off from the loss is named.

Activation recompute skips the backward of layers whose input does not require grad, and the embedding is frozen.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layout_oracle import relative_error
from oracle_tasks import first_step
from rank_process import RankProcesses, with_layout
from tiny_models import make_batch

BATCH = make_batch(8)
KINDS = {
    "dense": {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"},
    "moe": {"linear_qkv", "linear_proj", "experts.linear_fc1", "experts.linear_fc2"},
}


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_recompute_does_not_change_gradients(
    rank_processes: RankProcesses, oracle_config: Any, model: str, pp: int
) -> None:
    def gradients(recompute: str) -> dict[str, np.ndarray]:
        config = with_layout(oracle_config(model, algorithm={"kl_coef": 0.0}), pp=pp, recompute=recompute)
        ranks = rank_processes.run(first_step, config, BATCH, "bridge does not help")
        assert not any(rank["error"] for rank in ranks), ranks[0]["error"]
        found = {name: gradient for rank in ranks for name, gradient in rank["gradients"].items()}
        kinds = {name: kind for rank in ranks for name, kind in rank["kinds"].items()}
        for part in ("A", "B"):
            assert {kind for name, kind in kinds.items() if found[f"{name}.{part}"].any()} == KINDS[model]
        return found

    plain = gradients("none")
    for recompute in ("selective", "full"):
        recomputed = gradients(recompute)
        assert recomputed.keys() == plain.keys()
        for name, gradient in plain.items():
            assert relative_error(recomputed[name], gradient) <= 1e-6, (recompute, name)


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_the_trap_itself_is_an_error(rank_processes: RankProcesses, oracle_config: Any, model: str) -> None:
    config = with_layout(oracle_config(model, algorithm={"kl_coef": 0.0}), recompute="full")
    (rank,) = rank_processes.run(first_step, config, BATCH, "first input needs no gradient")
    names = ", ".join(sorted(KINDS[model]))
    assert rank["error"].startswith(f"adapted layers {names} have zero gradient"), rank["error"]


CUT_OFF = [
    # (model, layout, modules that pass no gradient on, layer types that get no gradient)
    ("dense", {}, ("mlp",), {"linear_fc1", "linear_fc2"}),
    ("dense", {"tp": 2, "pp": 2}, ("self_attention",), {"linear_qkv", "linear_proj"}),
    ("dense", {"replicas": 2}, ("core_attention",), {"linear_qkv"}),
    ("dense", {"pp": 2}, ("final_layernorm",), KINDS["dense"]),
    ("moe", {"ep": 2}, ("mlp",), {"experts.linear_fc1", "experts.linear_fc2"}),
    ("moe", {"tp": 2, "ep": 2, "pp": 2}, ("final_layernorm",), KINDS["moe"]),
]


@pytest.mark.parametrize(("model", "layout", "modules", "kinds"), CUT_OFF)
def test_layers_cut_off_from_the_loss_stop_the_first_step(
    rank_processes: RankProcesses,
    oracle_config: Any,
    model: str,
    layout: dict[str, int],
    modules: tuple[str, ...],
    kinds: set[str],
) -> None:
    """Every rank stops, on a stage without the fault too, names exactly these layer types, and makes no step."""
    config = with_layout(oracle_config(model, algorithm={"kl_coef": 0.0}), **layout)
    for rank in rank_processes.run(first_step, config, BATCH, "", modules):
        names = ", ".join(sorted(kinds))
        assert rank["error"].startswith(f"adapted layers {names} have zero gradient"), rank["error"]
        assert rank["unchanged"] and rank["steps"] == 0
