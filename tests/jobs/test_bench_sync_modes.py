"""The bench of sync modes refuses at once what one of its modes cannot do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import ray

from jobs.bench.sync_modes import configs_of_both_modes, main
from jobs.cli import read_recipe
from rl_actors.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["lora.variant=dora"], r"lora\.variant = dora is not one A and one B .*use sync\.mode = merged"),
        (
            ["rollout.sleep=weights", "placement.colocate=true", "pipeline.max_staleness=0"],
            r"sync\.mode=adapter: rollout\.sleep is weights and sync\.mode adapter",
        ),
    ],
)
def test_what_adapter_mode_cannot_do(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], sentence: str
) -> None:
    data = {"train": str(tiny_moe / "train.jsonl")}
    recipe = [f"model.path={json.dumps(str(tiny_moe))}", f"data={json.dumps(data)}", *overrides]
    monkeypatch.setattr(sys, "argv", ["sync_modes", *recipe])
    started = ray.is_initialized()
    with pytest.raises(ConfigError, match=sentence):
        main()
    assert ray.is_initialized() == started


def test_both_modes_are_the_recipe_otherwise() -> None:
    config = read_recipe("jobs/configs/qwen3_0_6b_gsm8k.yaml", ["lora.rank=8"])
    merged, adapter = configs_of_both_modes(config)
    assert (merged, merged.sync.mode, adapter.sync.mode) == (config, "merged", "adapter")
    assert adapter.lora == config.lora
