"""Real pools, started once for all tests of the training loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from rl_actors.driver.pools import start_pools
from rl_actors.preflight import prepare
from tests.driver.live_pools import LivePools, make_config


@pytest.fixture(scope="module")
def live(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePools]:
    prepared = prepare(make_config(tiny_moe, tmp_path_factory.mktemp("run")))
    pristine = tmp_path_factory.mktemp("pristine")
    ray.init(address="local", num_cpus=8, include_dashboard=False)
    try:
        with asyncio.Runner() as runner:
            context = start_pools(prepared.config, "live")
            pools = runner.run(context.__aenter__())
            try:
                live = LivePools(prepared, pools, runner, pristine)
                live.run(_save_pristine(live))
                yield live
            finally:
                runner.run(context.__aexit__(None, None, None))
    finally:
        ray.shutdown()


async def _save_pristine(live: LivePools) -> None:
    await live.pools.trainer.save(str(live.pristine))
    await live.pools.rollout.pause()
    await live.pools.sync.set_up(check_base=True)
    await live.pools.rollout.resume(0)
