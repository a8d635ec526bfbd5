"""What processes on a GPU must find set before they import anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_actors.actor_environment import CACHES, EXACT_FLOAT32, gpu_environment
from rl_actors.config import RunConfig


def _config(dtype: str) -> RunConfig:
    tree = {"run_dir": "runs/a", "model": {"path": "m", "dtype": dtype}, "data": {"train": "d"}}
    return RunConfig.model_validate(tree)


def test_caches_stay_between_runs_and_apart_by_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in CACHES:
        monkeypatch.delenv(name, raising=False)
    half, full = (gpu_environment(_config(dtype), "engine") for dtype in ("bfloat16", "float32"))
    assert gpu_environment(_config("bfloat16"), "engine") == half
    for name in CACHES:
        assert Path(half[name]).is_relative_to(tmp_path) and half[name] != full[name]
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    assert gpu_environment(_config("bfloat16"), "engine")["TRITON_CACHE_DIR"] == "/elsewhere"


def test_only_the_trainers_segments_grow_and_only_float32_is_exact() -> None:
    trainer, engine = gpu_environment(_config("float32"), "trainer"), gpu_environment(_config("bfloat16"), "engine")
    assert trainer["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert engine["PYTORCH_ALLOC_CONF"] == "expandable_segments:False"
    assert trainer.items() >= EXACT_FLOAT32.items()
    assert not EXACT_FLOAT32.keys() & engine.keys()
