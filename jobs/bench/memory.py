"""The most memory a process used beyond what it had at the start of a stretch of work, and what copying costs at least.

On a GPU torch's allocator counts it. On CPU it is the resident set's high-water mark, which Linux lets a process reset;
freed heap is given back first, so that the work cannot hide in it.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import torch

COPIES_BYTES = 256 * 2**20


class Memory:
    """A part of a trainer rank or an engine worker."""

    def __init__(self, worker: Any = None) -> None:
        self._before = 0

    def start(self) -> None:
        """Begin a stretch."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
            return
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmRSS")

    def extra(self) -> int:
        """Bytes at the peak since `start`, beyond what there was then."""
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _status("VmHWM")
        return max(0, peak - self._before)

    def copy(self, nbytes: int) -> float:
        """Seconds to copy `nbytes` from memory of this device to memory of the same device, a piece at a time."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        piece = min(nbytes, COPIES_BYTES)
        source = torch.ones(piece, dtype=torch.uint8, device=device)
        target = torch.empty_like(source).copy_(source)
        _finish(device)
        started = time.perf_counter()
        for start in range(0, nbytes, piece):
            count = min(piece, nbytes - start)
            target[:count].copy_(source[:count])
        _finish(device)
        return time.perf_counter() - started


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
