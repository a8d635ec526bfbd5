"""The oracle, and the configurations it measures."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl_actors.config import RunConfig

# Helpers beside the tests go by their plain names, in rank processes too.
sys.path.insert(0, str(Path(__file__).parent))

from layout_oracle import LayoutOracle
from oracle_models import MODELS, VARIANTS
from tiny_models import make_batch, save_tiny_model


@pytest.fixture(scope="session")
def oracle_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`oracle_config(model, **sections)`: one of `MODELS` in float32, eight heads, four key-value heads, eight experts.

    `model` may name one of `VARIANTS` behind a space; else adapters are those of `lora.variant: lora`.

    Gradients are clipped, and Adam's eps is about their size, so that a step shows more of them than the sign.
    """
    folders: dict[str, Path] = {}

    def make(name: str, /, **sections: dict[str, Any]) -> RunConfig:
        model, _, variant = name.partition(" ")
        chosen = VARIANTS[variant] if variant else {}
        if model not in folders:
            folder = tmp_path_factory.mktemp(model)
            folders[model] = save_tiny_model(folder, **MODELS[model], heads=8, kv_heads=4, experts=8)
        tree: dict[str, Any] = {
            "run_dir": "unused",
            "data": {"train": "unused"},
            "model": {"path": str(folders[model]), "dtype": "float32"},
            "lora": {"rank": 8, "alpha": 16, **chosen.get("lora", {})},
            "trainer": {
                "micro_batch_tokens": 40,
                "optimizer": {
                    "lr": 0.02,
                    "clip_grad": 1.2,
                    "adam_eps": 1e-2,
                    "weight_decay": 0.1,
                    **chosen.get("optimizer", {}),
                },
            },
            "rollout": {"temperature": 0.7},
            "algorithm": {"kl_coef": 0.1},
            "timeouts": {"step_s": 90},
        }
        for section, values in sections.items():
            tree[section] = {**tree.get(section, {}), **values}
        return RunConfig.model_validate(tree)

    return make


@pytest.fixture(scope="session")
def oracle(rank_processes: Any) -> LayoutOracle:
    """Twelve sequences of 5 to 16 tokens: four micro-batches of unequal width at world size 1.

    Advantages are not centred: a loss whose terms cancel would have a relative error that says nothing.
    """
    batch = make_batch(12)
    return LayoutOracle(rank_processes, replace(batch, advantages=batch.advantages + 1.0))
