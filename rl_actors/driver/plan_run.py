"""A run's placement on paper, from its configuration."""

from __future__ import annotations

from placement.layout import EngineLayout, MegatronLayout
from placement.plan import Device, PlacementPlan, make_plan
from rl_actors.config import RunConfig


def plan_run(config: RunConfig, device: Device) -> PlacementPlan:
    """The bundles of a run's trainer ranks and engines. Raises PlacementError if colocated engines do not fit."""
    return make_plan(
        MegatronLayout.from_config(config.trainer),
        EngineLayout.from_config(config.rollout),
        device,
        colocate=config.placement.colocate,
        cpus_per_bundle=config.placement.cpus_per_bundle,
        strategy=config.placement.strategy,
    )
