"""A run's placement on paper, from its configuration."""

from __future__ import annotations

from placement.layout import EngineLayout, MegatronLayout
from placement.plan import Device, PlacementPlan, make_plan
from rl_actors.config import RunConfig
from rl_actors.errors import PlacementError

MOST_ACTORS = 65_536


def plan_run(config: RunConfig, device: Device) -> PlacementPlan:
    """The bundles of a run's trainer ranks and engines.

    Raises:
        PlacementError: colocated engines do not fit, or the sizes are beyond any cluster.
    """
    trainer, engines = MegatronLayout.from_config(config.trainer), EngineLayout.from_config(config.rollout)
    if (count := trainer.world_size + engines.workers) > MOST_ACTORS:
        raise PlacementError(
            f"the plan needs {count} actors, and no cluster has more than {MOST_ACTORS}: "
            "lower trainer.replicas or rollout.engines"
        )
    return make_plan(
        trainer,
        engines,
        device,
        colocate=config.placement.colocate,
        cpus_per_bundle=config.placement.cpus_per_bundle,
        strategy=config.placement.strategy,
    )
