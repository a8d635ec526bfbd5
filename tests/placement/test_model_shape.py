"""Sizes read from config.json, and parameter counts against published ones."""

from __future__ import annotations

import json

import pytest

from placement.model_shape import ModelShape
from rl_actors.errors import ConfigError

QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
QWEN3_0_6B = {
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def test_parameter_counts_equal_the_published_models():
    assert ModelShape.from_hf_config(QWEN3_30B_A3B).parameters == 30_532_122_624
    assert ModelShape.from_hf_config(QWEN3_0_6B).parameters == 596_049_920


def test_sizes_of_a_mixture_of_experts():
    shape = ModelShape.from_hf_config(QWEN3_30B_A3B)
    assert (shape.experts, shape.topk, shape.moe_ffn, shape.moe_layers, shape.ffn) == (128, 8, 768, 48, 0)
    assert shape.is_moe and not shape.tied


def test_layers_without_experts_are_counted():
    shape = ModelShape.from_hf_config({**QWEN3_30B_A3B, "mlp_only_layers": [0, 1], "decoder_sparse_step": 2})
    assert (shape.moe_layers, shape.dense_layers, shape.ffn) == (23, 25, 6144)


def test_a_text_config_inside_is_read():
    assert ModelShape.from_hf_config({"text_config": QWEN3_0_6B}) == ModelShape.from_hf_config(QWEN3_0_6B)


def test_a_missing_size_is_named():
    with pytest.raises(ConfigError, match="vocab_size"):
        ModelShape.from_hf_config({key: value for key, value in QWEN3_0_6B.items() if key != "vocab_size"})


def test_a_folder_is_read_and_faults_name_it(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        ModelShape.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        ModelShape.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_0_6B))
    assert ModelShape.from_folder(tmp_path).num_layers == 28


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_key_value_heads", "four"),
        ("num_experts", "many"),
        ("decoder_sparse_step", "one"),
        ("mlp_only_layers", 5),
        ("mlp_only_layers", ["0"]),
        ("text_config", "x"),
        ("num_experts_per_tok", 129),
        ("head_dim", -128),
        ("moe_intermediate_size", "wide"),
        ("max_position_embeddings", "long"),
        ("num_hidden_layers", True),
    ],
)
def test_an_unusable_size_is_named(key, value):
    with pytest.raises(ConfigError, match=key):
        ModelShape.from_hf_config({**QWEN3_30B_A3B, key: value})
