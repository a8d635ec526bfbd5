"""Targets and exclusions are read as the built model reads them, from its sizes alone."""

from __future__ import annotations

import pytest

from placement.model_shape import ModelShape
from rl_actors.errors import ConfigError
from rl_actors.lora_config import LoraConfig
from rl_actors.targets import adapted_linears, check_targets, selects

DENSE = ModelShape(
    num_layers=12,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=128,
    moe_ffn=0,
    experts=0,
    topk=0,
    vocab=9,
    tied=False,
)
MOE = ModelShape(**{**DENSE.__dict__, "ffn": 0, "moe_ffn": 32, "experts": 4, "topk": 2, "moe_layers": 12})
MIXED = ModelShape(**{**MOE.__dict__, "ffn": 128, "moe_layers": 6})


def adapted(shape: ModelShape, device: str = "auto", **lora: object) -> list[str]:
    return sorted(check_targets(LoraConfig.model_validate(lora), shape, device))


@pytest.mark.parametrize(
    ("shape", "device", "lora", "sentence"),
    [
        (
            DENSE,
            "auto",
            {"targets": ["*.linear_foo"]},
            r"lora\.targets: '\*\.linear_foo' matches no linear .*: did you mean \*\.linear_fc\d or \*\.linear_fc\d\?$",
        ),
        (DENSE, "auto", {"targets": ["linear_qvk"]}, r"'linear_qvk' matches no linear .*: did you mean linear_qkv"),
        (MOE, "auto", {"exclude": ["router"]}, r"lora\.exclude: 'router' matches no linear .*: did you mean linear_"),
        (
            DENSE,
            "auto",
            {"exclude": ["*.layers.99.*"]},
            r"lora\.exclude: '\*\.layers\.99\.\*' .*: its layers are 0 to 11$",
        ),
        (MOE, "auto", {"targets": ["*.layers.1.*.experts.4.linear_fc1"]}, "its experts are 0 to 3$"),
        (DENSE, "auto", {"targets": ["*.experts.*.linear_fc1"]}, r"names such as decoder\.layers\.0\.mlp\.linear_fc1$"),
        (
            DENSE,
            "auto",
            {"targets": ["layers.0.mlp.linear_fc1"]},
            r"names such as decoder\.layers\.0\.mlp\.linear_fc1$",
        ),
        (MOE, "gpu", {"targets": ["*.experts.*.linear_fc2"]}, r"such as decoder\.layers\.0\.mlp\.experts\.linear_fc2$"),
        (MOE, "auto", {"targets": ["*.mlp.linear_fc2"]}, "such as .*experts"),
        (DENSE, "auto", {"targets": ["*"]}, r"reach the output layer.*add output_layer to lora\.exclude"),
        (DENSE, "auto", {"exclude": ["*layer*"]}, "lora.exclude takes away all"),
    ],
)
def test_what_matches_nothing_is_one_sentence(shape: ModelShape, device: str, lora: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        adapted(shape, device, **lora)
    assert "\n" not in str(caught.value)


def test_the_output_layer_may_be_left_out_by_name() -> None:
    assert adapted(DENSE, targets=["*"], exclude=["output_layer"])


def test_names_are_those_of_either_device() -> None:
    wildcards = {"targets": ["*.experts.local_experts.3.linear_fc2", "*.experts.linear_fc1"]}
    on_either = adapted(MOE, **wildcards)
    assert len(on_either) == 12 + 12 * 4
    with pytest.raises(ConfigError, match=r"'\*\.experts\.linear_fc1' matches no"):
        adapted(MOE, "cpu", **wildcards)
    with pytest.raises(ConfigError, match=r"'\*\.experts\.local_experts\.3\.linear_fc2' matches no"):
        adapted(MOE, "gpu", **wildcards)


def test_a_dot_is_a_dot() -> None:
    assert adapted(DENSE, targets=["*.layers.1.*.linear_qkv"]) == ["layers.1.self_attention.linear_qkv"]
    assert not selects("*.layers.1.*", "decoder.layers.10.mlp.linear_fc1")


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("linear_fc1", True),
        ("decoder.layers.1.mlp.linear_fc1", True),
        ("*", True),
        ("decoder.*.mlp.*", True),
        ("*1*1*", True),
        ("*1*1*1*", False),
        ("decoder.layers.1.mlp.linear_fc1*linear_fc1", False),
        ("*.linear", False),
        ("decoder.layers.1", False),
        ("*l" * 200, False),
    ],
)
def test_stars_stand_for_any_text(pattern: str, wanted: bool) -> None:
    assert selects(pattern, "decoder.layers.1.mlp.linear_fc1") is wanted


def test_where_only_some_layers_have_experts_either_may_be_meant() -> None:
    for target in ("*.layers.0.mlp.linear_fc1", "*.layers.0.mlp.experts.*"):
        assert adapted(MIXED, targets=[target])


def test_exclusions_and_parts() -> None:
    sizes = adapted_linears(DENSE, LoraConfig(variant="canonical_lora", exclude=("*.layers.0.*", "linear_v")))
    assert len(sizes) == 11 * 6 and sizes["layers.1.self_attention.linear_k"] == (32, 64)
