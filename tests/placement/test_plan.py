"""Who owns which bundle, on paper."""

from __future__ import annotations

import pytest

from placement.feasibility import Node, check_feasible
from placement.layout import EngineLayout, MegatronLayout
from placement.plan import make_plan
from rl_actors.errors import PlacementError


def test_every_actor_has_one_bundle_of_its_own():
    plan = make_plan(MegatronLayout(tp=2, pp=2, replicas=2), EngineLayout(2, 2), "gpu", cpus_per_bundle=2)
    assert [group.name for group in plan.groups] == ["trainer-0", "trainer-1", "engine-0", "engine-1"]
    assert len(plan.seats) == plan.bundle_count == 8 + 4
    assert all(len(bundle.owners) == 1 for group in plan.groups for bundle in group.bundles)
    assert {(seat.num_gpus, seat.num_cpus) for seat in plan.seats.values()} == {(1.0, 2.0)}
    assert plan.bundle_resources == {"GPU": 1.0, "CPU": 2}


def test_actor_names_say_where_they_stand_in_the_layout():
    plan = make_plan(MegatronLayout(tp=2, pp=2, ep=2), EngineLayout(1, 1), "cpu")
    assert plan.trainer_actors[3] == "trainer-0/rank-3 tp1 pp1 ep1"
    assert plan.engine_actors == (("engine-0/worker-0",),)


def test_tensor_parallel_neighbours_have_neighbouring_bundles_of_their_rank_group():
    plan = make_plan(MegatronLayout(tp=2, pp=2, replicas=2), EngineLayout(1, 1), "cpu")
    by_rank = [plan.seats[actor] for actor in plan.trainer_actors]
    assert [(seat.group, seat.position) for seat in by_rank] == [
        ("trainer-0", 0), ("trainer-0", 1), ("trainer-1", 0), ("trainer-1", 1),
        ("trainer-0", 2), ("trainer-0", 3), ("trainer-1", 2), ("trainer-1", 3),
    ]  # fmt: skip
    assert [seat.rank for seat in by_rank] == list(range(8))


def test_colocated_bundles_are_shared_in_halves():
    plan = make_plan(MegatronLayout(ep=4), EngineLayout(3, 1), "gpu", colocate=True)
    assert [group.name for group in plan.groups] == ["trainer-0"]
    bundles = plan.groups[0].bundles
    assert bundles[2].owners == ("trainer-0/rank-2 tp0 pp0 ep2", "engine-2/worker-0")
    assert plan.seats["engine-2/worker-0"].num_gpus == plan.seats["trainer-0/rank-2 tp0 pp0 ep2"].num_gpus == 0.5
    assert plan.seats["trainer-0/rank-3 tp0 pp0 ep3"].num_gpus == 1.0
    assert all(sum(plan.seats[owner].num_cpus for owner in bundle.owners) == 1.0 for bundle in bundles)


def test_a_colocated_engine_never_spans_two_rank_groups():
    plan = make_plan(MegatronLayout(tp=3, replicas=2), EngineLayout(2, 2), "cpu", colocate=True)
    for workers in plan.engine_actors:
        assert len({plan.seats[worker].group for worker in workers}) == 1
    with pytest.raises(PlacementError, match="hold 2 engines"):
        make_plan(MegatronLayout(tp=3, replicas=2), EngineLayout(3, 2), "cpu", colocate=True)


def _nodes(*totals: dict[str, float]) -> list[Node]:
    return [Node(f"{i:08d}", f"host-{i}", total, total) for i, total in enumerate(totals)]


@pytest.mark.parametrize(
    ("options", "nodes", "sentence"),
    [
        (
            {"device": "gpu"},
            _nodes({"GPU": 8, "CPU": 64}),
            "the plan needs 12 bundles of 1 GPU, 1 CPU, the cluster has 8 GPUs on 1 node: "
            "lower trainer.replicas or rollout.engines",
        ),
        (
            {"device": "gpu", "cpus_per_bundle": 8.0},
            _nodes({"GPU": 16, "CPU": 64}),
            "the cluster has 64 CPUs on 1 node: lower placement.cpus_per_bundle",
        ),
        (
            {"device": "cpu"},
            _nodes({"CPU": 8}),
            "the plan needs 12 bundles of 1 CPU, the cluster has 8 CPUs on 1 node",
        ),
        (
            {"device": "cpu", "cpus_per_bundle": 3.0},
            _nodes(*[{"CPU": 4}] * 10),
            "the cluster's 10 nodes hold 10 of them because a bundle cannot be split",
        ),
        (
            {"device": "gpu", "strategy": "STRICT_PACK"},
            _nodes(*[{"GPU": 4, "CPU": 64}] * 4),
            "group trainer-0 needs 8 bundles of 1 GPU, 1 CPU on one node (placement.strategy STRICT_PACK), "
            "the largest node holds 4",
        ),
    ],
)
def test_a_cluster_that_can_never_hold_the_plan_is_refused(options, nodes, sentence):
    plan = make_plan(MegatronLayout(ep=8), EngineLayout(4, 1), **options)
    with pytest.raises(PlacementError) as caught:
        check_feasible(plan, nodes)
    assert sentence in str(caught.value)


def test_a_busy_cluster_is_not_refused():
    node = Node("0" * 8, "host", {"GPU": 12, "CPU": 12}, {})
    check_feasible(make_plan(MegatronLayout(ep=8), EngineLayout(4, 1), "gpu"), [node])


def test_fractions_of_a_cpu_add_up():
    plan = make_plan(MegatronLayout(tp=2), EngineLayout(1, 1), "cpu", cpus_per_bundle=0.1)
    check_feasible(plan, _nodes({"CPU": 0.3}))
