"""Real placement groups on a private Ray node with 16 CPUs and 8 logical GPUs."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import ray

from placement.bundles import BundleSpot, check, cluster_nodes, grant, order_bundles, resolve_device, where_am_i
from placement.layout import EngineLayout, MegatronLayout
from placement.plan import make_plan
from rl_actors.errors import PlacementError

TARGET = (MegatronLayout(ep=4), EngineLayout(4, 1))


@pytest.fixture(scope="module")
def cluster():
    ray.init(address="local", num_cpus=16, num_gpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


class _Sitter:
    def where(self):
        return where_am_i()


def _report(placement, actors):
    sitter = ray.remote(_Sitter)
    handles = {actor: sitter.options(**placement.actor_options(actor)).remote() for actor in actors}
    reports = ray.get([handle.where.remote() for handle in handles.values()], timeout=60)
    for handle in handles.values():
        ray.kill(handle)
    return dict(zip(handles, reports, strict=True))


def _free() -> dict[str, float]:
    return {name: cluster_nodes()[0].free.get(name, 0) for name in ("CPU", "GPU")}


def _until_free(resources: dict[str, float]) -> None:
    """Ray hands resources back a moment after it says that a group is removed."""
    deadline = time.monotonic() + 10
    while _free() != resources and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _free() == resources


def test_the_target_sits_where_planned(cluster):
    """Trainer EP4 on four GPUs and four engines on the other four; neighbouring ranks on neighbouring GPUs."""
    plan = make_plan(*TARGET, resolve_device("auto"))
    assert plan.device == "gpu"
    placement = grant(plan, timeout_s=60, run_name="target")
    try:
        assert _free()["GPU"] == 0
        reports = _report(placement, plan.seats)
        check(placement, reports)
        assert sorted(gpu for report in reports.values() for gpu in report.gpu_ids) == [str(i) for i in range(8)]
        trainer_gpus = [int(reports[actor].gpu_ids[0]) for actor in plan.trainer_actors]
        assert trainer_gpus == sorted(trainer_gpus)
        first, second = list(reports)[:2]
        swapped = {first: reports[second], second: reports[first]}
        with pytest.raises(PlacementError, match=r"rank-0 .* belongs on bundle .*rank-1 .* belongs on bundle"):
            check(placement, swapped)
        with pytest.raises(PlacementError, match="it is on no bundle"):
            check(placement, {first: replace(reports[first], placement_group_id=None, bundle_index=None)})
    finally:
        placement.release()
    _until_free({"CPU": 16, "GPU": 8})


def test_colocated_actors_share_a_gpu(cluster):
    plan = make_plan(MegatronLayout(tp=2), EngineLayout(1, 2), "gpu", colocate=True)
    placement = grant(plan, timeout_s=60)
    try:
        reports = _report(placement, plan.seats)
        check(placement, reports)
        for rank, worker in zip(plan.trainer_actors, plan.engine_actors[0], strict=True):
            assert reports[rank].gpu_ids == reports[worker].gpu_ids
    finally:
        placement.release()
    _until_free({"CPU": 16, "GPU": 8})


def test_a_cpu_plan_takes_no_gpu(cluster):
    plan = make_plan(MegatronLayout(tp=2), EngineLayout(1, 1), "cpu", cpus_per_bundle=0.5)
    placement = grant(plan, timeout_s=30)
    try:
        _until_free({"CPU": 14.5, "GPU": 8})
        actor = plan.trainer_actors[1]
        check(placement, _report(placement, [actor]))
        assert placement.bundle_name(actor) == "trainer-0/bundle-1"
    finally:
        placement.release()
        placement.release()
    _until_free({"CPU": 16, "GPU": 8})


def test_a_plan_too_big_for_the_cluster_is_refused_at_once(cluster):
    started = time.monotonic()
    with pytest.raises(
        PlacementError, match=r"needs 12 bundles of 1 GPU.*has 8 GPUs on 1 node: lower trainer\.replicas"
    ):
        grant(make_plan(MegatronLayout(ep=8), EngineLayout(4, 1), "gpu"), timeout_s=60)
    assert time.monotonic() - started < 5
    _until_free({"CPU": 16, "GPU": 8})


def test_a_busy_cluster_is_named_bundle_by_bundle_and_nothing_stays_reserved(cluster):
    other = grant(make_plan(MegatronLayout(), EngineLayout(1, 1), "gpu"), timeout_s=60)
    try:
        started = time.monotonic()
        with pytest.raises(PlacementError) as caught:
            grant(make_plan(*TARGET, "gpu"), timeout_s=2)
        assert time.monotonic() - started < 8
        message = str(caught.value)
        assert "engine-2 misses engine-2/bundle-0 (1 GPU, 1 CPU each)" in message
        assert "engine-3 misses" in message and "trainer-0 misses" not in message
        assert "0 of 8 GPU free" in message and "within placement.timeout_s = 2" in message
        _until_free({"CPU": 14, "GPU": 6})
    finally:
        other.release()
    _until_free({"CPU": 16, "GPU": 8})


def test_a_second_run_of_the_same_name_is_refused_without_touching_the_first(cluster):
    plan = make_plan(MegatronLayout(), EngineLayout(1, 1), "cpu")
    first = grant(plan, timeout_s=30, run_name="twice")
    try:
        with pytest.raises(PlacementError, match=r"'twice/trainer-0'.*already exists"):
            grant(plan, timeout_s=30, run_name="twice")
        _until_free({"CPU": 14, "GPU": 8})
    finally:
        first.release()
    grant(plan, timeout_s=30, run_name="twice").release()
    _until_free({"CPU": 16, "GPU": 8})


def test_where_am_i_is_not_for_drivers(cluster):
    with pytest.raises(RuntimeError, match="driver"):
        where_am_i()


def _spots(*spots: tuple[str, str]) -> list[BundleSpot]:
    return [BundleSpot(index, node, (gpu,)) for index, (node, gpu) in enumerate(spots)]


def test_bundles_are_ordered_by_node_and_gpu():
    ordered = order_bundles(_spots(("a", "10"), ("b", "1"), ("a", "9"), ("b", "0")), neighbours=2)
    assert [(spot.node_id, spot.gpu_ids[0]) for spot in ordered] == [("a", "9"), ("a", "10"), ("b", "0"), ("b", "1")]


def test_neighbours_stay_on_one_node_where_sets_fit():
    """Nodes with 3, 2 and 3 bundles hold three whole pairs; only the leftovers pair up across nodes."""
    spots = _spots(*[("a", str(i)) for i in range(3)], ("b", "0"), ("b", "1"), *[("c", str(i)) for i in range(3)])
    ordered = [spot.node_id for spot in order_bundles(spots, neighbours=2)]
    assert ordered == ["a", "a", "b", "b", "c", "c", "a", "c"]


def test_cpu_bundles_keep_rays_order():
    spots = [BundleSpot(index, "a") for index in (2, 0, 1)]
    assert [spot.index for spot in order_bundles(spots, neighbours=1)] == [0, 1, 2]
