"""All pools of a run: started together on one placement, ended together.

Invariant: whatever happens on the way, no actor and no bundle is left behind.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from placement.bundles import Placement, grant, resolve_device
from rl_actors.config import RunConfig
from rl_actors.driver.plan_run import plan_run
from rl_actors.driver.together import together
from rl_actors.rewards.pool import RewardPool
from rl_actors.rollout.pool import RolloutPool
from rl_actors.tracking.console import PlacedActor
from rl_actors.trainer.pool import TrainerPool
from rl_actors.weight_sync.sync import EngineMembers, TrainerMembers, WeightSync

logger = logging.getLogger(__name__)


@dataclass
class Pools:
    """The running pools. Engines hold the base model and are not in the sync group until `sync.set_up`."""

    placement: Placement
    trainer: TrainerPool
    rollout: RolloutPool
    reward: RewardPool
    sync: WeightSync

    def placed_actors(self) -> list[PlacedActor]:
        """Where every actor of every pool is, for people."""
        rows = []
        for pool, actors in (
            ("trainer", self.trainer.actors),
            ("rollout", self.rollout.actors),
            ("reward", self.reward.actors),
        ):
            for name, actor in actors.actors.items():
                bundle = self.placement.bundle_name(name) if actors.placement is not None else ""
                where = actor.where
                gpus = ",".join(where.gpu_ids) if where else ""
                rows.append(
                    PlacedActor(pool, name, bundle, where.host if where else "", gpus, where.pid if where else None)
                )
        return rows


@asynccontextmanager
async def start_pools(config: RunConfig, run_name: str) -> AsyncIterator[Pools]:
    """Reserve the bundles, start all pools at the same time, and end them when the block ends.

    Raises:
        PlacementError, ActorLateError, ActorDiedError: nothing is left running.
    """
    device = resolve_device(config.placement.device)
    plan = plan_run(config, device)
    placement = await asyncio.to_thread(grant, plan, config.placement.timeout_s, run_name)
    trainer = TrainerPool(config, placement, device, run_name)
    rollout = RolloutPool(config, placement, device, run_name)
    reward = RewardPool(config.reward, run_name)
    try:
        if device == "gpu" and config.placement.colocate and config.rollout.kv_cache_gib is None:
            # vLLM measures free memory to size its KV cache, and refuses if that changes under it (0.26).
            await together([rollout.start(), trainer.load_libraries()])
        rest = [trainer.start(), reward.start()]
        await together(rest if rollout.started else [*rest, rollout.start()])
        sync = WeightSync(
            TrainerMembers(trainer.actors),
            EngineMembers(rollout.actors, config.rollout.tp),
            rollout.pause,
            rollout.resume,
            config.sync,
            config.timeouts.sync_s,
            run_name,
            colocate=config.placement.colocate,
            engines_differ=config.model.random_weights,
            send_all=config.rollout.sleep == "weights",
        )
        yield Pools(placement, trainer, rollout, reward, sync)
    finally:
        for pool in (trainer.actors, rollout.actors, reward.actors):
            await pool.akill()
        await asyncio.to_thread(placement.release)
