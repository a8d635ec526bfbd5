"""The GPU memory that an engine gives back while the trainer works, and takes again.

    "kv"       the KV cache alone; the weights stay where they are
    "weights"  everything; the weights come back empty, and the next sync fills all of them

vLLM can only free everything (its levels 1 and 2), so "kv" unmaps the cache's part of vLLM's own allocator. Addresses
stay reserved meanwhile, so CUDA graphs are valid after waking. Requests that hold KV are computed again.
"""

from __future__ import annotations

from typing import Any, Literal

Part = Literal["kv", "weights"]

KV_CACHE = "kv_cache"
WEIGHTS = "weights"
"""vLLM's names of the two pools."""


def free_kv_cache(worker: Any) -> int:
    """Runs on a vLLM worker; returns the bytes given back.

    vLLM 0.26 (device_allocator/cumem.py) has no such call; it can go when `CuMemAllocator.sleep` takes tags.
    """
    import torch
    from vllm.device_allocator.cumem import CuMemAllocator, unmap_and_release

    torch.cuda.synchronize()
    freed = 0
    for data in CuMemAllocator.get_instance().pointer_to_data.values():
        if data.tag == KV_CACHE and not data.is_asleep:
            unmap_and_release(data.handle)
            data.is_asleep = True
            freed += data.handle[1]
    torch.cuda.empty_cache()
    return freed


def map_kv_cache(worker: Any) -> None:
    """Runs on a vLLM worker after `free_kv_cache`."""
    from vllm.device_allocator.cumem import CuMemAllocator

    CuMemAllocator.get_instance().wake_up([KV_CACHE])


def free_bytes(worker: Any) -> int:
    """Runs on a vLLM worker: bytes that are free on its GPU, whoever uses the rest."""
    import torch

    return int(torch.cuda.mem_get_info()[0])
