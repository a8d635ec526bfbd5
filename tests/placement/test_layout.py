"""Rank order against Megatron-Core's own generator, sizes, and the sentences for layouts that cannot work."""

from __future__ import annotations

import itertools
import os

import pytest

from placement.layout import EngineLayout, MegatronLayout
from placement.model_shape import ModelShape
from rl_actors.errors import ConfigError

QWEN3_30B = ModelShape(48, 2048, 32, 4, 128, 0, 768, 128, 8, 151936, False, moe_layers=48, qk_norm=True)
DENSE = ModelShape(6, 96, 6, 2, 32, 288, 0, 0, 0, 512, True)

LAYOUTS = [MegatronLayout(*sizes) for sizes in itertools.product((1, 2), (1, 2), (1, 2), (1, 2, 4), (1, 2), (1, 2))]


@pytest.fixture(scope="module")
def rank_generator():
    # The import reaches flashinfer, which refuses a cubin package of another version; no kernel of it is used here.
    os.environ.setdefault("FLASHINFER_DISABLE_VERSION_CHECK", "1")
    return pytest.importorskip("megatron.core.parallel_state").RankGenerator


@pytest.mark.parametrize("axis", ["tp", "cp", "dp", "pp"])
def test_dense_axes_match_megatron(rank_generator, axis):
    for layout in LAYOUTS:
        generator = rank_generator(layout.tp, 1, layout.dp, layout.pp, layout.cp, "tp-cp-ep-dp-pp")
        assert generator.world_size == layout.world_size
        _same_order(layout, generator.get_ranks(axis), axis)


@pytest.mark.parametrize("axis", ["ep", "etp", "edp", "pp"])
def test_expert_axes_match_megatron(rank_generator, axis):
    for layout in LAYOUTS:
        generator = rank_generator(layout.etp, layout.ep, layout.edp, layout.pp, 1, "tp-cp-ep-dp-pp")
        assert generator.world_size == layout.world_size
        _same_order(layout, generator.get_ranks({"etp": "tp", "edp": "dp"}.get(axis, axis)), axis)


def _same_order(layout: MegatronLayout, groups: list[list[int]], axis: str) -> None:
    """Within each of Megatron's groups our coordinate along that axis counts up from 0."""
    for ranks in groups:
        assert [getattr(layout.coords(rank), axis) for rank in ranks] == list(range(len(ranks))), layout


def test_a_rank_group_is_one_whole_copy():
    for layout in LAYOUTS:
        for replica in range(layout.replicas):
            coords = [layout.coords(rank) for rank in layout.group_ranks(replica)]
            assert len(coords) == layout.group_size
            dense = {(c.tp, c.cp, c.pp) for c in coords}
            experts = {(c.etp, c.ep, c.pp) for c in coords}
            assert len(dense) == layout.tp * layout.cp * layout.pp
            assert len(experts) == layout.etp * layout.ep * layout.pp


def test_ep_uses_the_tp_ranks():
    assert MegatronLayout(tp=2, pp=2, ep=2).world_size == 4
    assert MegatronLayout(ep=4).dp == 4
    assert MegatronLayout(tp=4, ep=2).edp == 2
    assert MegatronLayout(tp=2, ep=3).group_size == 6


def test_rank_groups_interleave_with_pipeline_stages():
    layout = MegatronLayout(tp=2, pp=2, replicas=2)
    assert layout.group_ranks(0) == [0, 1, 4, 5]
    assert layout.group_ranks(1) == [2, 3, 6, 7]


@pytest.mark.parametrize("rank", [-1, 4])
def test_ranks_outside_the_world_are_refused(rank):
    with pytest.raises(IndexError):
        MegatronLayout(tp=4).coords(rank)


@pytest.mark.parametrize(
    ("layout", "model", "sentence"),
    [
        (MegatronLayout(tp=3), QWEN3_30B, "trainer.tp = 3 does not divide the model's 32 attention heads: use 2 or 4"),
        (MegatronLayout(tp=8), QWEN3_30B, "trainer.tp = 8 does not divide the model's 4 key-value heads: use 4"),
        (MegatronLayout(ep=3), QWEN3_30B, "trainer.ep = 3 does not divide the model's 128 experts: use 2 or 4"),
        (MegatronLayout(pp=4), DENSE, "trainer.pp = 4 does not divide the model's 6 layers: use 3 or 6"),
        (MegatronLayout(ep=2), DENSE, "this model is dense: use trainer.ep = 1"),
        (MegatronLayout(ep=2, etp=2), QWEN3_30B, "trainer.etp = 2 is not supported"),
        (EngineLayout(tp=5), QWEN3_30B, "rollout.tp = 5 does not divide the model's 32 attention heads: use 4 or 8"),
        (EngineLayout(tp=3), DENSE, "neither divides nor is a multiple of the model's 2 key-value heads"),
    ],
)
def test_a_layout_that_cannot_cut_the_model_says_so(layout, model, sentence):
    with pytest.raises(ConfigError) as caught:
        layout.check_model(model)
    assert sentence in str(caught.value)


def test_every_fault_is_named_at_once():
    with pytest.raises(ConfigError, match=r"trainer.tp = 3 .*trainer.pp = 5 .*trainer.ep = 7"):
        MegatronLayout(tp=3, pp=5, ep=7).check_model(QWEN3_30B)


@pytest.mark.parametrize(
    "layout", [MegatronLayout(ep=4), MegatronLayout(tp=4, pp=2, ep=8), EngineLayout(4, 1), EngineLayout(1, 8)]
)
def test_good_layouts_pass(layout):
    layout.check_model(QWEN3_30B)


@pytest.mark.parametrize("size", [0, -1, 1.0, True])
def test_sizes_are_positive_whole_numbers(size):
    with pytest.raises(ConfigError, match=r"trainer\.tp"):
        MegatronLayout(tp=size)
    with pytest.raises(ConfigError, match=r"rollout\.engines"):
        EngineLayout(engines=size)
