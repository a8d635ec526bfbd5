"""Configurations of tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_tiny_model

from rl_actors.config import RunConfig


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`tiny_config(model, **sections)`: a run configuration in float32 for one of the models below."""
    folders: dict[str, Path] = {}
    models: dict[str, dict[str, Any]] = {
        "dense": {"arch": "dense"},
        "tied": {"arch": "dense", "tied": True},
        "biased": {"arch": "biased"},
        "odd": {"arch": "dense", "vocab": 97},
        "moe": {"arch": "moe"},
        "moe_tied": {"arch": "moe", "tied": True},
    }

    def make(name: str, /, **sections: dict[str, Any]) -> RunConfig:
        if name not in folders:
            folders[name] = save_tiny_model(tmp_path_factory.mktemp(name), **models[name])
        tree: dict[str, Any] = {
            "run_dir": "unused",
            "data": {"train": "unused"},
            "model": {"path": str(folders[name]), "dtype": "float32"},
            "lora": {"rank": 4, "alpha": 8},
            "trainer": {"micro_batch_tokens": 64, "optimizer": {"lr": 0.01, "clip_grad": 0.05}},
            "rollout": {"temperature": 0.7},
            "algorithm": {"kl_coef": 0.1},
            "timeouts": {"step_s": 90},
        }
        for section, values in sections.items():
            tree[section] = {**tree.get(section, {}), **values}
        return RunConfig.model_validate(tree)

    return make
