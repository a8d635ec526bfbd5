"""From the run's configuration to vLLM's own settings, for both devices.

What is set here is either needed for the numbers (processed logprobs, seeds that hold in every batch) or for a small
model on few cores (no compile, small blocks, one process). Everything else is vLLM's default.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Literal

from placement.model_shape import layer_cut
from rl_actors.actor_environment import cpu_environment
from rl_actors.config import RunConfig
from rl_actors.errors import ConfigError
from rl_actors.lora_config import LoraConfig
from rl_actors.weight_sync.slot_rank import slot_rank

Device = Literal["cpu", "gpu"]

CPU_KV_CACHE_GIB = 0.5
"""KV cache on CPU when the configuration names no size."""
CPU_PREFILL_TOKENS = 4096
"""Prompt tokens of one step on CPU (more if one prompt may be longer)."""
CPU_BLOCK_SIZE = 32
"""Tokens of a KV block on CPU. vLLM takes 128 there; only full blocks of a prompt can be shared between its samples."""


def engine_environment(device: Device, threads: int) -> dict[str, str]:
    """Environment of the engine's process. Best set before it starts; `prepare_process` sets what is missing."""
    environment = {
        # The engine lives in the actor itself, so that its worker can join Ray collective groups.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if device == "cpu":
        # Inductor would compile for 25 s; without it the engine starts in a second (after the imports).
        environment |= {
            "TORCH_COMPILE_DISABLE": "1",
            # On CPU vLLM warns about preloading, NUMA and compile on every start; none of it needs the user.
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        environment |= cpu_environment(threads)
    return environment


def prepare_process(device: Device, threads: int) -> None:
    """Set up this process for vLLM. Call it before anything of vLLM is imported."""
    for key, value in engine_environment(device, threads).items():
        os.environ.setdefault(key, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # When a step fails vLLM logs every request in the batch, pages of it. The error is raised and names the prompts.
    logging.getLogger("vllm.logging_utils.dump_input").setLevel(logging.CRITICAL + 1)
    if device == "cpu":
        import torch

        # vLLM's CPU worker replaces torch.set_num_threads with a no-op, so the number is set before it exists.
        torch.set_num_threads(threads)


def engine_arguments(config: RunConfig, device: Device) -> dict[str, Any]:
    """Keyword arguments of vLLM's `EngineArgs`.

    Raises:
        ConfigError: the device cannot run the engine as configured.
    """
    rollout = config.rollout
    arguments: dict[str, Any] = {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "seed": config.seed,
        "max_model_len": rollout.max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "tensor_parallel_size": rollout.tp,
        "enforce_eager": rollout.enforce_eager,
        "enable_prefix_caching": True,
        # Logprobs of the distribution that was sampled from: after temperature and truncation.
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if config.model.random_weights:
        # vLLM's values are nobody's: the first sync replaces all of them.
        arguments["load_format"] = "dummy"
        arguments["hf_overrides"] = layer_cut(config.model.path, config.model.layers)
    if config.sync.mode == "adapter":
        arguments |= _lora_arguments(config.lora)
    return arguments | (_cpu_arguments(config) if device == "cpu" else _gpu_arguments(config))


LORA_LAYERS = {
    "linear_qkv": {"qkv_proj"},
    "linear_proj": {"o_proj"},
    "linear_fc1": {"gate_up_proj", "experts"},
    "linear_fc2": {"down_proj", "experts"},
}
"""vLLM's layers under Megatron's adapter targets."""


def _lora_arguments(lora: LoraConfig) -> dict[str, Any]:
    """One adapter slot, for the layers that are trained: vLLM would put LoRA on embedding and output layer as well."""
    kinds = [LORA_LAYERS.get(target.rpartition(".")[2]) for target in lora.targets]
    known = [kind for kind in kinds if kind is not None]
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": slot_rank(lora.rank),
        # A target that is a wildcard to its end may be any layer.
        "lora_target_modules": sorted(set().union(*known)) if len(known) == len(kinds) else None,
    }


def _cpu_arguments(config: RunConfig) -> dict[str, Any]:
    rollout = config.rollout
    if rollout.tp > 1:
        raise ConfigError(
            f"rollout.tp is {rollout.tp}, but on CPU an engine is one process: set rollout.tp to 1 and, "
            "for more sampling, raise rollout.engines"
        )
    return {
        "kv_cache_memory_bytes": int((rollout.kv_cache_gib or CPU_KV_CACHE_GIB) * 2**30),
        "block_size": CPU_BLOCK_SIZE,
        # vLLM 0.26 winds back the generator of a seeded request whose prompt is computed in parts, and CPU generators
        # cannot be wound back ("CPU Generator does not use offset"). So a prompt is always computed in one step.
        # Can go when GPUModelRunner._bookkeeping_sync no longer calls Generator.set_offset on CPU.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(CPU_PREFILL_TOKENS, rollout.max_model_len),
        # vLLM 0.26's CPU sampler ignores all seeds of a batch that also holds a greedy request (it takes the branch to
        # compiled_random_sample in TopKTopPSampler.forward_cpu), unless the noise is float64. Goes with that branch.
        "use_fp64_gumbel": True,
    }


def _gpu_arguments(config: RunConfig) -> dict[str, Any]:
    rollout = config.rollout
    arguments: dict[str, Any] = {
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enable_sleep_mode": rollout.sleep != "never",
    }
    if rollout.kv_cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(rollout.kv_cache_gib * 2**30)
        # vLLM 0.26 still refuses to start when less than this share is free, although it then uses the size above; on a
        # colocated GPU the trainer may be there first.
        arguments["gpu_memory_utilization"] = 0.01
    if rollout.tp > 1:
        # Workers become Ray actors in the placement group that the engine's own actor sits in.
        arguments["distributed_executor_backend"] = "ray"
    return arguments
