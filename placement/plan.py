"""Which actor takes which bundle: a plan on paper, made before Ray is asked for anything.

Invariants: every trainer rank and every engine worker has exactly one bundle; a bundle has one owner, or two when the
plan is colocated; all bundles of a plan are alike. A *group* becomes one Ray placement group, so its bundles are
granted all at once or not at all. The bundles of a rank group stand in the order of its ranks, so tensor parallel
neighbours have neighbouring bundles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from placement.layout import EngineLayout, MegatronLayout
from rl_actors.errors import PlacementError

Device = Literal["cpu", "gpu"]
Strategy = Literal["PACK", "STRICT_PACK", "SPREAD"]


@dataclass(frozen=True)
class Bundle:
    """What one rank or engine worker (or one of each) reserves on one node.

    Attributes:
        name: such as "trainer-0/bundle-3".
        owners: names of the actors that share it equally.
        resources: Ray resources, such as {"GPU": 1, "CPU": 1}.
    """

    name: str
    owners: tuple[str, ...]
    resources: dict[str, float]

    def share(self, resource: str) -> float:
        """What each owner takes of a resource."""
        return self.resources.get(resource, 0.0) / len(self.owners)


@dataclass(frozen=True)
class Group:
    """Bundles that are granted together.

    Attributes:
        name: "trainer-0" (rank group 0), "engine-0" ...
        bundles: in rank order.
        neighbours: so many consecutive bundles (a tensor parallel group) belong on one node.
    """

    name: str
    bundles: tuple[Bundle, ...]
    neighbours: int = 1


@dataclass(frozen=True)
class Seat:
    """Where one actor belongs and what it takes there.

    Attributes:
        actor: readable and unique in the plan, such as "trainer-0/rank-3 tp1 pp0 ep1" or "engine-0/worker-0".
        group, position: its bundle, as the place in `Group.bundles`.
        num_cpus, num_gpus: what the actor asks Ray for.
        rank: the global trainer rank, or the worker's index within its engine.
    """

    actor: str
    group: str
    position: int
    num_cpus: float
    num_gpus: float
    rank: int


@dataclass(frozen=True)
class PlacementPlan:
    """All groups of a run, and the actors on them.

    Attributes:
        trainer_actors: actor names in the order of global ranks.
        engine_actors: for each engine the names of its workers.
    """

    groups: tuple[Group, ...]
    device: Device
    strategy: Strategy
    colocate: bool
    trainer_actors: tuple[str, ...]
    engine_actors: tuple[tuple[str, ...], ...]
    ranks: dict[str, int]

    @cached_property
    def seats(self) -> dict[str, Seat]:
        """Every actor's seat by its name."""
        return {
            owner: Seat(owner, group.name, position, bundle.share("CPU"), bundle.share("GPU"), self.ranks[owner])
            for group in self.groups
            for position, bundle in enumerate(group.bundles)
            for owner in bundle.owners
        }

    @property
    def bundle_count(self) -> int:
        return sum(len(group.bundles) for group in self.groups)

    @property
    def bundle_resources(self) -> dict[str, float]:
        """Resources of each bundle; all are alike."""
        return self.groups[0].bundles[0].resources

    def describe(self) -> str:
        """One line for each bundle: its name, resources and owners."""
        return "\n".join(
            f"{bundle.name:<24} {describe_resources(bundle.resources):<16} {' + '.join(bundle.owners)}"
            for group in self.groups
            for bundle in group.bundles
        )


def make_plan(
    trainer: MegatronLayout,
    engines: EngineLayout,
    device: Device,
    colocate: bool = False,
    cpus_per_bundle: float = 1.0,
    strategy: Strategy = "PACK",
) -> PlacementPlan:
    """Put every trainer rank and engine worker on a bundle.

    `device` is already decided ("auto" is `placement.bundles.resolve_device`).

    Raises:
        PlacementError: colocated engines do not fit into the rank groups.
    """
    resources = {"GPU": 1.0, "CPU": cpus_per_bundle} if device == "gpu" else {"CPU": cpus_per_bundle}
    trainer_actors = tuple(_trainer_actor(trainer, rank) for rank in range(trainer.world_size))
    engine_actors = tuple(
        tuple(f"engine-{engine}/worker-{worker}" for worker in range(engines.tp)) for engine in range(engines.engines)
    )
    rank_groups = [
        _group(f"trainer-{replica}", [(trainer_actors[rank],) for rank in ranks], resources, trainer.tp)
        for replica in range(trainer.replicas)
        for ranks in [trainer.group_ranks(replica)]
    ]
    if colocate:
        groups = _seat_engines(rank_groups, engine_actors, engines.tp)
    else:
        groups = rank_groups + [
            _group(f"engine-{engine}", [(worker,) for worker in workers], resources, engines.tp)
            for engine, workers in enumerate(engine_actors)
        ]
    ranks = {actor: rank for rank, actor in enumerate(trainer_actors)}
    ranks |= {actor: worker for workers in engine_actors for worker, actor in enumerate(workers)}
    return PlacementPlan(tuple(groups), device, strategy, colocate, trainer_actors, engine_actors, ranks)


def describe_resources(resources: dict[str, float], count: int = 1) -> str:
    """ "8 GPUs, 16 CPUs" for people; `count` multiplies."""
    return ", ".join(
        f"{amount * count:g} {name}{'' if amount * count == 1 else 's'}" for name, amount in resources.items()
    )


def _trainer_actor(layout: MegatronLayout, rank: int) -> str:
    at = layout.coords(rank)
    context = f" cp{at.cp}" if layout.cp > 1 else ""
    return f"trainer-{layout.rank_group(rank)}/rank-{rank} tp{at.tp}{context} pp{at.pp} ep{at.ep}"


def _group(name: str, owners: list[tuple[str, ...]], resources: dict[str, float], neighbours: int) -> Group:
    bundles = tuple(Bundle(f"{name}/bundle-{i}", owner, resources) for i, owner in enumerate(owners))
    return Group(name, bundles, neighbours)


def _seat_engines(rank_groups: list[Group], engine_actors: tuple[tuple[str, ...], ...], tp: int) -> list[Group]:
    """Give each engine `tp` consecutive bundles of one rank group, so that an engine never spans two of them."""
    free = [(index, start) for index, g in enumerate(rank_groups) for start in range(0, len(g.bundles) - tp + 1, tp)]
    if len(free) < len(engine_actors):
        raise PlacementError(
            f"placement.colocate puts engines on the trainer's bundles: {len(rank_groups)} rank groups of "
            f"{len(rank_groups[0].bundles)} bundles hold {len(free)} engines of rollout.tp = {tp}, and "
            f"rollout.engines = {len(engine_actors)}: lower rollout.engines or rollout.tp, or raise trainer.replicas"
        )
    groups = list(rank_groups)
    for workers, (index, start) in zip(engine_actors, free, strict=False):
        bundles = list(groups[index].bundles)
        for offset, worker in enumerate(workers):
            bundle = bundles[start + offset]
            bundles[start + offset] = replace(bundle, owners=(*bundle.owners, worker))
        groups[index] = replace(groups[index], bundles=tuple(bundles), neighbours=max(tp, groups[index].neighbours))
    return groups
