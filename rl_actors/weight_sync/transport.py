"""What moves weights between two kinds of processes."""

from __future__ import annotations

from rl_actors.errors import ConfigError

MAPPING = ("cuda_ipc", "shared_memory")
"""Transports whose receivers map the sender's memory: on GPUs, and on CPU."""


def choose_transport(wanted: str, device: str, colocate: bool) -> str:
    """The transport of a group.

    Args:
        wanted: `sync.transport`.
        device: "cpu" or "cuda", of all members.
        colocate: members share GPUs.

    Raises:
        ConfigError: the one that is wanted cannot work.
    """
    best = "shared_memory" if device == "cpu" else "cuda_ipc" if colocate else "nccl"
    if wanted in ("auto", best, "gloo"):
        return best if wanted == "auto" else wanted
    if device == "cpu":
        why = "it needs GPUs"
    elif wanted == "shared_memory":
        why = "it is for CPU processes"
    elif wanted == "nccl":
        why = "it refuses two members on one GPU, and the plan is colocated"
    else:
        return wanted
    raise ConfigError(f"sync.transport = {wanted!r} cannot be used here, {why}: write 'auto' or {best!r}")
