"""A private Ray cluster, the tiny models and vLLM's layers, shared by the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from rl_actors.rollout.vllm_settings import prepare_process
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


@pytest.fixture(scope="module")
def vllm_layers(tmp_path_factory):
    """vLLM's layers, in a process of one rank; tests tell them another rank and size."""
    prepare_process("cpu", 1)
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.model_executor.layers import linear

    with set_current_vllm_config(VllmConfig()):
        rendezvous = tmp_path_factory.mktemp("vllm") / "rendezvous"
        init_distributed_environment(1, 0, f"file://{rendezvous}", 0, backend="gloo")
        initialize_model_parallel(1)
        yield linear
    destroy_model_parallel()
    destroy_distributed_environment()


@pytest.fixture(params=[(1, 0), (2, 0), (2, 1), (4, 0), (4, 3)], ids=lambda p: f"tp{p[0]}-rank{p[1]}")
def place(request, monkeypatch, vllm_layers):
    from vllm.model_executor import parameter
    from vllm.model_executor.layers.fused_moe import config

    size, rank = request.param
    for module in (vllm_layers, parameter, config):
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: size, raising=module is not config)
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
    return size, rank
