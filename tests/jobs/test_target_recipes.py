"""The 8-GPU recipes load, validate against their model's real sizes, and get their bundles on a node of 8 GPUs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from placement.bundles import cluster_nodes, grant, resolve_device
from placement.memory import estimate_memory
from rl_actors.config_file import load_config
from rl_actors.driver.plan_run import plan_run
from rl_actors.preflight import check_model

CONFIGS = Path(__file__).resolve().parents[2] / "jobs" / "configs"
COMMON = {"num_attention_heads": 32, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
MODELS = {
    "qwen3_30b_a3b_gsm8k.yaml": COMMON
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "tie_word_embeddings": False,
    },
    "qwen3_0_6b_gsm8k.yaml": COMMON
    | {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
}


@pytest.fixture(scope="module")
def node_of_8_gpus() -> Iterator[None]:
    ray.init(address="local", num_cpus=16, num_gpus=8, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.mark.parametrize("recipe", MODELS)
def test_the_recipe_fits_a_node_of_8(recipe: str, node_of_8_gpus: None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[recipe]))
    config = load_config(CONFIGS / recipe, [f"model.path={tmp_path}"])
    shape, layout, engines = check_model(config)
    assert layout.world_size + engines.workers == 8
    assert estimate_memory(config, shape, gpu_gib=80).ok

    placement = grant(plan_run(config, resolve_device(config.placement.device)), timeout_s=60)
    try:
        assert [node.free.get("GPU", 0) for node in cluster_nodes()] == [0]
        assert len({gpu for spots in placement.spots.values() for spot in spots for gpu in spot.gpu_ids}) == 8
    finally:
        placement.release()
