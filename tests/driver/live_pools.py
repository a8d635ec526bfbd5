"""Real pools that several tests use one after the other, and the configuration they run with."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_actors.config import RunConfig
from rl_actors.config_file import parse_config
from rl_actors.driver.pools import Pools
from rl_actors.preflight import Prepared

STEPS = 4

TREE: dict[str, Any] = {
    "lora": {"rank": 8, "alpha": 16},
    "trainer": {"micro_batch_tokens": 2048, "optimizer": {"lr": 0.003, "schedule": "linear"}},
    "rollout": {"max_model_len": 96, "max_new_tokens": 16},
    "placement": {"cpus_per_bundle": 0.5},
    "pipeline": {"steps": STEPS, "prompts_per_step": 4, "samples_per_prompt": 4, "max_staleness": 0},
    "reward": {"function": "tests.driver.length_reward:shorter_is_better"},
    "checkpoint": {"every_steps": 1, "keep_last": 10},
    "tracking": {"wandb": "off"},
    "timeouts": {"start_s": 240, "rollout_s": 60, "step_s": 60, "sync_s": 60},
}


def make_config(model: Path, run_dir: Path, **sections: dict[str, Any]) -> RunConfig:
    tree = copy.deepcopy(TREE)
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    tree["run_dir"] = str(run_dir)
    tree["model"] = {"path": str(model), "dtype": "float32"}
    tree["data"] = {"train": str(model / "train.jsonl")}
    return parse_config(tree, "test")


@dataclass
class LivePools:
    """Pools on an event loop of their own; `reset` makes trainer and engines as new."""

    prepared: Prepared
    pools: Pools
    runner: asyncio.Runner
    pristine: Path

    def run(self, coroutine: Any) -> Any:
        return self.runner.run(asyncio.wait_for(coroutine, 240))

    def reset(self) -> None:
        async def back() -> None:
            await self.pools.trainer.load(str(self.pristine))
            await self.pools.sync.run(0)

        self.run(back())
