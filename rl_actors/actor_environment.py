"""Environment of trainer ranks and engines: what must be set before torch, CUDA, Triton or vLLM are imported.

On a GPU, compiled kernels are kept in one folder of the user, so that only the first run of a shape compiles; a
variable that the user has set himself wins. The allocator is set for each kind of process, not by the user: the
trainer's grows and shrinks its segments, so that memory it gives back can be used by the engine beside it; the engine's
must not, because vLLM's sleep mode maps memory itself.
"""

from __future__ import annotations

import os
from typing import Literal

from rl_actors.config import RunConfig
from rl_actors.paths import cache_path

Role = Literal["trainer", "engine"]

CACHES = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
EXACT_FLOAT32 = {
    # Transformer Engine asks cuBLAS for TF32 in every float32 product; this overrides it in all NVIDIA libraries.
    "NVIDIA_TF32_OVERRIDE": "0",
    # The same for Triton's dot products, vLLM's experts and float32 attention among them.
    "TRITON_F32_DEFAULT": "ieee",
}


def cpu_environment(threads: int) -> dict[str, str]:
    """Variables for a trainer rank's or an engine's process on CPU."""
    return {
        "OMP_NUM_THREADS": str(threads),
        # Huge pages for torch's large tensors: a sync makes and fills whole layers, and the first write to each small
        # page costs more than the copy. The user's own setting wins.
        "THP_MEM_ALLOC_ENABLE": os.environ.get("THP_MEM_ALLOC_ENABLE") or "1",
    }


def gpu_environment(config: RunConfig, role: Role) -> dict[str, str]:
    """Variables for a trainer rank's or an engine's process on a GPU."""
    # A folder for each type: the precision of float32 products is no part of a cached kernel's name.
    compiled = cache_path() / "compiled" / config.model.dtype
    environment = {name: os.environ.get(name) or str(compiled / folder) for name, folder in CACHES.items()}
    expandable = f"expandable_segments:{role == 'trainer'}"
    # torch reads the first name; vLLM and older torch the second.
    environment |= {"PYTORCH_ALLOC_CONF": expandable, "PYTORCH_CUDA_ALLOC_CONF": expandable}
    return environment | (EXACT_FLOAT32 if config.model.dtype == "float32" else {})
