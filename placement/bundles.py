"""From a plan to Ray placement groups, and back to the truth about where actors sit.

Invariants: `grant` never waits longer than it was told to, says what is missing, and leaves nothing reserved after a
failure. A plan's bundle always means the same Ray bundle, so an actor that restarts comes back to its GPU.

How ranks get their GPUs. Ray numbers the bundles of a group in no useful order: which GPU a bundle holds is fixed
when the group is granted, and only seen from inside. So on GPU a short probe task on each bundle reports node and GPU
index; the bundles are then sorted by (node, GPU index), and the plan's bundle i, which is rank i of the group, gets the
i-th of them. Where a group spans nodes, each node first gives whole sets of neighbours (tensor parallel groups), and
only what is left over is split. On CPU Ray's own table of bundles and nodes says enough and nothing is probed.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from placement.feasibility import Node, check_feasible
from placement.location import Location, where_am_i
from placement.plan import Device, Group, PlacementPlan, Seat, describe_resources
from rl_actors.errors import PlacementError

__all__ = ["BundleSpot", "Location", "Placement", "check", "cluster_nodes", "grant", "resolve_device", "where_am_i"]

logger = logging.getLogger(__name__)

RELEASE_WAIT_S = 10.0


@dataclass(frozen=True)
class BundleSpot:
    """Where a Ray bundle is: its index in Ray's group, the node, and the GPUs it holds (empty on CPU)."""

    index: int
    node_id: str
    gpu_ids: tuple[str, ...] = ()


@dataclass
class Placement:
    """A granted plan. It lives as long as the process that asked for it, or until `release`."""

    plan: PlacementPlan
    groups: dict[str, PlacementGroup]
    spots: dict[str, list[BundleSpot]] = field(default_factory=dict)

    def spot(self, group: str, position: int) -> BundleSpot:
        """The Ray bundle behind the plan's bundle `position` of a group."""
        return self.spots[group][position]

    def strategy(self, group: str, position: int) -> PlacementGroupSchedulingStrategy:
        """The scheduling strategy that puts an actor on the plan's bundle `position` of a group."""
        return PlacementGroupSchedulingStrategy(
            placement_group=self.groups[group],
            placement_group_bundle_index=self.spot(group, position).index,
            placement_group_capture_child_tasks=False,
        )

    def seat(self, actor: str) -> Seat:
        """The seat of an actor by its name in the plan.

        Raises:
            PlacementError: the plan has no such actor.
        """
        if actor not in self.plan.seats:
            raise PlacementError(f"the plan has no actor {actor!r}; it has {', '.join(sorted(self.plan.seats))}")
        return self.plan.seats[actor]

    def actor_options(self, actor: str) -> dict[str, Any]:
        """`num_cpus`, `num_gpus` and `scheduling_strategy` for `ActorClass.options`."""
        seat = self.seat(actor)
        strategy = self.strategy(seat.group, seat.position)
        return {"num_cpus": seat.num_cpus, "num_gpus": seat.num_gpus, "scheduling_strategy": strategy}

    def bundle_name(self, actor: str) -> str:
        seat = self.seat(actor)
        group = next(group for group in self.plan.groups if group.name == seat.group)
        return group.bundles[seat.position].name

    def release(self) -> None:
        """Give every bundle back (its actors die with it). Safe to call twice."""
        _remove(self.groups)


def resolve_device(device: Literal["auto", "cpu", "gpu"]) -> Device:
    """ "auto" is "gpu" if the connected cluster has any GPU."""
    if device != "auto":
        return device
    return "gpu" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"


def cluster_nodes() -> list[Node]:
    """The living nodes of the connected cluster with their total and free resources, biggest first."""
    # The state API has this only through the dashboard; Ray 2.60 marks this call as its developers' API.
    free = ray._private.state.available_resources_per_node()
    nodes = [
        Node(node["NodeID"], node["NodeManagerHostname"], dict(node["Resources"]), dict(free.get(node["NodeID"], {})))
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: (-node.total.get("GPU", 0), -node.total.get("CPU", 0), node.id))


def grant(plan: PlacementPlan, timeout_s: float, run_name: str = "") -> Placement:
    """Reserve every bundle of the plan.

    Args:
        timeout_s: bound on the whole call, in seconds.
        run_name: prefix of the placement groups' names in Ray's dashboard; empty leaves them unnamed. Names are
            unique within a job.

    Raises:
        PlacementError: the cluster is too small (at once), or the bundles were not granted in time; the message names
            each missing bundle and what every node has free. Nothing stays reserved.
    """
    deadline = time.monotonic() + timeout_s
    check_feasible(plan, cluster_nodes())
    groups: dict[str, PlacementGroup] = {}
    try:
        for group in plan.groups:
            groups[group.name] = _create(plan, group, run_name)
        missing = [group for group in plan.groups if not groups[group.name].wait(max(0.0, deadline - time.monotonic()))]
        if missing:
            raise PlacementError(_explain_missing(plan, missing, timeout_s))
        placement = Placement(plan, groups)
        for group in plan.groups:
            spots = _find_spots(plan, group, groups[group.name], deadline)
            placement.spots[group.name] = order_bundles(spots, group.neighbours)
            _warn_if_neighbours_part(group, placement.spots[group.name])
        return placement
    except BaseException:
        _remove(groups)
        raise


def order_bundles(spots: list[BundleSpot], neighbours: int) -> list[BundleSpot]:
    """Put a group's bundles in the order of its ranks: by node, then by GPU index.

    Nodes come in the order of Ray's bundles. Each gives whole sets of `neighbours` first; what does not fill a set
    comes at the end.
    """
    whole: list[BundleSpot] = []
    rest: list[BundleSpot] = []
    by_index = sorted(spots, key=lambda spot: spot.index)
    for node_id in dict.fromkeys(spot.node_id for spot in by_index):
        here = sorted((spot for spot in by_index if spot.node_id == node_id), key=_gpu_order)
        sets = len(here) // neighbours * neighbours
        whole += here[:sets]
        rest += here[sets:]
    return whole + rest


def check(placement: Placement, reports: Mapping[str, Location]) -> None:
    """Compare where actors say they are with the plan.

    Args:
        reports: `where_am_i()` of each actor by its name in the plan; it may cover a part of the plan's actors.

    Raises:
        PlacementError: an actor sits elsewhere; every such actor is named with both places.
    """
    faults = []
    for actor, report in reports.items():
        seat = placement.seat(actor)
        group, spot = placement.groups[seat.group], placement.spot(seat.group, seat.position)
        planned = (group.id.hex(), spot.index, spot.node_id)
        actual = (report.placement_group_id, report.bundle_index, report.node_id)
        if planned != actual or (spot.gpu_ids and report.gpu_ids != spot.gpu_ids):
            faults.append(
                f"{actor} belongs on {_place(*planned, spot.gpu_ids)}, it is on {_place(*actual, report.gpu_ids)}"
            )
    if faults:
        raise PlacementError("; ".join(faults))


def _gpu_order(spot: BundleSpot) -> tuple[tuple[int, int | str], ...]:
    """GPU indices in number order; UUIDs, where the cluster shows only those, in text order; then Ray's index."""
    gpus: list[tuple[int, int | str]] = [(0, int(gpu)) if gpu.isdigit() else (1, gpu) for gpu in spot.gpu_ids]
    return (*gpus, (2, spot.index))


def _find_spots(plan: PlacementPlan, group: Group, granted: PlacementGroup, deadline: float) -> list[BundleSpot]:
    if plan.device == "cpu":
        nodes = placement_group_table(granted)["bundles_to_node_id"]
        return [BundleSpot(index, nodes[index]) for index in range(len(group.bundles))]
    probe = ray.remote(num_cpus=0, num_gpus=1, max_retries=0)(where_am_i)
    refs = [
        probe.options(scheduling_strategy=PlacementGroupSchedulingStrategy(granted, index)).remote()
        for index in range(len(group.bundles))
    ]
    try:
        reports = ray.get(refs, timeout=max(0.0, deadline - time.monotonic()))
    except ray.exceptions.GetTimeoutError as error:
        raise PlacementError(
            f"the bundles of group {group.name} are granted, but their nodes did not start a probe within "
            "placement.timeout_s: raise it, or look at the nodes' load"
        ) from error
    return [BundleSpot(index, report.node_id, report.gpu_ids) for index, report in enumerate(reports)]


def _create(plan: PlacementPlan, group: Group, run_name: str) -> PlacementGroup:
    name = f"{run_name}/{group.name}" if run_name else ""
    try:
        return placement_group([bundle.resources for bundle in group.bundles], strategy=plan.strategy, name=name)
    except ray.exceptions.RaySystemError as error:
        raise PlacementError(
            f"Ray refused placement group {name or group.name!r}: {' '.join(str(error).split())}. If the name exists, "
            "another run of this job holds it: release that one, or give this run another run_dir"
        ) from error


def _explain_missing(plan: PlacementPlan, missing: list[Group], timeout_s: float) -> str:
    need = describe_resources(plan.bundle_resources)
    lacking = "; ".join(
        f"{group.name} misses {', '.join(bundle.name for bundle in group.bundles)} ({need} each)" for group in missing
    )
    nodes = "; ".join(node.describe(plan.bundle_resources) for node in cluster_nodes())
    held = [group.name for group in plan.groups if group not in missing]
    taken = f" with {', '.join(held)} granted" if held else ""
    return (
        f"the cluster did not grant all bundles within placement.timeout_s = {timeout_s:g}: {lacking}. "
        f"Nodes{taken}: {nodes}. Wait for other jobs to end, lower the layout, or raise placement.timeout_s"
    )


def _warn_if_neighbours_part(group: Group, spots: list[BundleSpot]) -> None:
    for neighbours in itertools.batched(spots, group.neighbours):
        if len({spot.node_id for spot in neighbours}) > 1:
            logger.warning(
                "a tensor parallel group of %s spans nodes, which is slow: use placement.strategy=STRICT_PACK or a "
                "smaller tp",
                group.name,
            )
            return


def _place(group_id: str | None, index: int | None, node_id: str, gpu_ids: tuple[str, ...]) -> str:
    gpus = f" GPU {','.join(gpu_ids)}" if gpu_ids else ""
    where = "no bundle" if group_id is None else f"bundle {index} of placement group {group_id[:8]}"
    return f"{where} on node {node_id[:8]}{gpus}"


def _remove(groups: dict[str, PlacementGroup]) -> None:
    """Remove the groups and wait, within a bound, until Ray says they are gone."""
    if not ray.is_initialized():
        return
    for group in groups.values():
        remove_placement_group(group)
    deadline = time.monotonic() + RELEASE_WAIT_S
    for name, group in groups.items():
        while (state := placement_group_table(group).get("state", "REMOVED")) != "REMOVED":
            if time.monotonic() > deadline:
                logger.warning("placement group %s is still %s after %g s", name, state, RELEASE_WAIT_S)
                break
            time.sleep(0.05)
