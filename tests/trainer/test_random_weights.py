"""Weights made from config.json alone: the same model in every layout, and sane numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tasks
import torch
from rank_process import RankProcesses, with_layout
from tiny_models import make_batch

from rl_actors.trainer.random_weights import STANDARD_DEVIATION, elements


def test_an_element_depends_on_its_place_alone() -> None:
    whole = elements("a", (0, 40), (0, 30), seed=1)
    torch.testing.assert_close(elements("a", (8, 24), (10, 20), seed=1), whole[8:24, 10:20], rtol=0, atol=0)
    for other in (elements("b", (0, 40), (0, 30), seed=1), elements("a", (0, 40), (0, 30), seed=2)):
        assert not (other == whole).any()


def test_elements_are_uniform_and_not_correlated() -> None:
    drawn = elements("model.layers.0.mlp.experts.5.up_proj.weight", (0, 768), (0, 2048), seed=0).double()
    limit = STANDARD_DEVIATION * 3**0.5
    assert drawn.abs().max() <= limit
    assert float(drawn.std()) == pytest.approx(STANDARD_DEVIATION, rel=0.01)
    assert abs(float(drawn.mean())) < 1e-4
    share = torch.histc(drawn, bins=10, min=-limit, max=limit) / drawn.numel()
    assert ((share - 0.1).abs() < 0.002).all()
    scaled = drawn / STANDARD_DEVIATION
    for neighbour in (scaled.roll(1, 0), scaled.roll(1, 1)):
        assert abs(float((scaled * neighbour).mean())) < 0.005


@pytest.mark.parametrize(("model", "layout"), [("moe", {"tp": 2, "pp": 2, "ep": 2}), ("odd", {"tp": 2})])
def test_layout_does_not_change_the_model(
    rank_processes: RankProcesses, tiny_config: Any, model: str, layout: dict[str, int]
) -> None:
    config, batch = tiny_config(model, model={"random_weights": True}), make_batch()
    one = rank_processes.run(tasks.train_once, config, batch)[0]
    cut = rank_processes.run(tasks.train_once, with_layout(config, **layout), batch)[0]
    assert np.isfinite(one["logprobs"]).all() and one["logprobs"].std() > 0
    np.testing.assert_allclose(cut["logprobs"], one["logprobs"], rtol=0, atol=1e-5)
    assert cut["metrics"]["grad_norm"] == pytest.approx(one["metrics"]["grad_norm"], rel=1e-5)


def test_a_cut_model_has_fewer_layers(rank_processes: RankProcesses, tiny_config: Any) -> None:
    config = tiny_config("moe", model={"random_weights": True, "layers": 1})
    (names,) = rank_processes.run(tasks.adapter_names, config)
    assert {name.split(".")[1] for name in names} == {"0"}
