"""The two process groups that move bytes, made apart from torch's default one, and how to wait for each in steps."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import ray
import torch.distributed as dist

STEP_S = 0.25
"""A wait for gloo looks around this often."""


def make_gloo(store: dist.TCPStore, rank: int, world_size: int, timeout_s: float) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    # Without a device gloo resolves the host's name, which is the loopback on many machines.
    options._devices = [gloo.create_device(hostname=ray.util.get_node_ip_address())]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 2
    return gloo(dist.PrefixStore("gloo", store), rank, world_size, options)


def make_nccl(store: dist.TCPStore, rank: int, world_size: int, timeout_s: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    # Ours is the timeout that counts. NCCL's own watchdog ends the whole process, so it comes later and is off.
    options._timeout = timedelta(seconds=10 * timeout_s)
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        return dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, world_size, options)
    finally:
        os.environ.pop(name) if before is None else os.environ.__setitem__(name, before)


def watch_gloo(work: Any, timeout_s: float) -> Iterator[bool]:
    """Yield False until the work is done, then True.

    Gloo's point-to-point work only knows that it is done when waited for, a wait that times out breaks all of its
    connections, and its abort() does not wake one (torch 2.11). So a thread waits, and is left behind on an abort.
    """
    done = threading.Event()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            errors.append(error)
        done.set()

    threading.Thread(target=wait, daemon=True, name="weight-sync-wait").start()
    while not done.wait(STEP_S):
        yield False
    if errors:
        raise errors[0]
    yield True


def watch_nccl(work: Any, timeout_s: float) -> Iterator[bool]:
    """Yield False until the kernel is done, then True with the current stream ordered behind it."""
    del timeout_s
    while not work.is_completed():
        yield False
        time.sleep(0.0005)
    work.wait()
    yield True
