"""A private Ray cluster and the tiny models, shared by the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from tests.rollout.tiny_rollout import make_model


@pytest.fixture(scope="module")
def ray_cluster():
    ray.init(address="local", num_cpus=8, num_gpus=0, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def moe_model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("moe") / "model", "moe")


@pytest.fixture(scope="module")
def dense_model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("dense") / "model", "dense")
