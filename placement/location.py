"""Where a process really is, told by the process itself.

Invariant: `where_am_i` reads only what Ray assigned to this worker and never initialises CUDA, so it can be called
in any actor at any time.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from dataclasses import dataclass
from functools import cache

import ray

# Ray names the resources of a bundle "bundle_group_<index>_<placement group id>"; every actor on it holds a sliver.
_BUNDLE = re.compile(r"^bundle_group_(\d+)_([0-9a-f]+)$")


@dataclass(frozen=True)
class Location:
    """Attributes:
    node_id, host, pid: the process.
    placement_group_id, bundle_index: Ray's own, None outside a placement group. The index is Ray's, not the plan's.
    gpu_ids: indices of the GPUs Ray assigned, as Ray gives them.
    gpu_uuids: the same GPUs by UUID; empty where no NVIDIA driver answers (CPU, or GPUs that are only logical).
    """

    node_id: str
    host: str
    pid: int
    placement_group_id: str | None
    bundle_index: int | None
    gpu_ids: tuple[str, ...]
    gpu_uuids: tuple[str, ...]

    def __str__(self) -> str:
        gpus = f" GPU {','.join(self.gpu_ids)}" if self.gpu_ids else ""
        return f"{self.host} ({self.node_id[:8]}){gpus} pid {self.pid}"


def where_am_i() -> Location:
    """The location of the calling Ray worker.

    Raises:
        RuntimeError: called outside a Ray actor or task.
    """
    context = ray.get_runtime_context()
    if context.worker.mode != ray.WORKER_MODE:
        raise RuntimeError("where_am_i is for Ray actors and tasks; a driver has no bundle")
    # The public get_assigned_resources() drops the bundle index (Ray 2.60); the worker's own table keeps it.
    resources = context.worker.core_worker.resource_ids()
    found = next((match for name in resources if (match := _BUNDLE.match(name))), None)
    gpu_ids = tuple(str(gpu) for gpu in ray.get_gpu_ids())
    return Location(
        node_id=context.get_node_id(),
        host=socket.gethostname(),
        pid=os.getpid(),
        placement_group_id=found[2] if found else None,
        bundle_index=int(found[1]) if found else None,
        gpu_ids=gpu_ids,
        gpu_uuids=_uuids(gpu_ids),
    )


def _uuids(gpu_ids: tuple[str, ...]) -> tuple[str, ...]:
    if not gpu_ids:
        return ()
    known = _driver_uuids()
    if any(gpu not in known and not gpu.startswith(("GPU-", "MIG-")) for gpu in gpu_ids):
        return ()
    return tuple(known.get(gpu, gpu) for gpu in gpu_ids)


@cache
def _driver_uuids() -> dict[str, str]:
    """GPU index to UUID, in the driver's order, which is the order of Ray's indices."""
    query = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(tuple(part.strip() for part in line.split(",", 1)) for line in lines if "," in line)  # type: ignore[misc]
