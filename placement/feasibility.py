"""Can these nodes hold this plan at all? Asked of the nodes' totals, before anything is reserved.

Invariant: a plan that no state of these nodes could hold is refused at once, with the settings to lower; a plan that
only waits for others to free their resources passes.
"""

from __future__ import annotations

from dataclasses import dataclass

from placement.plan import PlacementPlan, describe_resources
from rl_actors.errors import PlacementError


@dataclass(frozen=True)
class Node:
    """One machine of the cluster: Ray's node id, its host name, and resources such as {"CPU": 16.0, "GPU": 8.0}."""

    id: str
    host: str
    total: dict[str, float]
    free: dict[str, float]

    def describe(self, resources: dict[str, float]) -> str:
        """What is free here of the resources that matter, such as "host-a (1a2b3c4d): 2 of 8 GPU free"."""
        parts = [f"{self.free.get(name, 0):g} of {self.total.get(name, 0):g} {name} free" for name in resources]
        return f"{self.host} ({self.id[:8]}): {', '.join(parts)}"


def check_feasible(plan: PlacementPlan, nodes: list[Node]) -> None:
    """Compare the plan with what the nodes have in total.

    Raises:
        PlacementError: what is needed, what there is, and which setting to lower.
    """
    need, count = plan.bundle_resources, plan.bundle_count
    bundles = f"the plan needs {count} bundles of {describe_resources(need)}"
    where = f"on {len(nodes)} node{'' if len(nodes) == 1 else 's'}"
    for resource, amount in need.items():
        total = sum(node.total.get(resource, 0.0) for node in nodes)
        if amount * count > total + 1e-6:
            raise PlacementError(
                f"{bundles}, the cluster has {describe_resources({resource: total})} {where}: {_advice(plan, resource)}"
            )
    room = [_room(node.total, need) for node in nodes]
    if sum(room) < count:
        raise PlacementError(
            f"{bundles}, and the cluster's {len(nodes)} nodes hold {sum(room)} of them because a bundle cannot be "
            f"split over nodes: {_advice(plan, 'CPU')}"
        )
    if plan.strategy == "STRICT_PACK":
        largest = max(plan.groups, key=lambda group: len(group.bundles))
        if len(largest.bundles) > max(room):
            raise PlacementError(
                f"group {largest.name} needs {len(largest.bundles)} bundles of {describe_resources(need)} on one node "
                f"(placement.strategy STRICT_PACK), the largest node holds {max(room)}: use placement.strategy=PACK "
                "or a smaller layout"
            )


def _room(total: dict[str, float], need: dict[str, float]) -> int:
    """How many bundles one node holds when it is empty."""
    return int(min((total.get(name, 0.0) + 1e-6) // amount for name, amount in need.items() if amount))


def _advice(plan: PlacementPlan, resource: str) -> str:
    sizes = "trainer.replicas" if plan.colocate else "trainer.replicas or rollout.engines"
    if resource == "GPU":
        return f"lower {sizes}"
    return f"lower placement.cpus_per_bundle, {sizes}"
