"""Memory that another process may map: CUDA IPC on a GPU, shared memory on CPU. All that differs by device is here.

Invariant: what `open_handle` returns is the exporter's memory itself, valid as long as the exporter keeps the buffer.
A buffer that is freed while it is mapped stays until it is released, and nothing outlives the processes.
"""

from __future__ import annotations

import inspect
import os
import weakref
from typing import Any

import ray
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

Handle = dict[str, Any]
"""Small and picklable; to be opened once, by one process."""

_files: dict[int, int] = {}
"""On CPU, the file descriptor behind each buffer, by address."""
_identities: dict[int, tuple[int, int, int]] = {}
"""Which file each of these descriptors was opened for."""


def place(device: str) -> str:
    """Where this process's memory is: "node/GPU UUID", or "node/cpu".

    The UUID, because both sides may see the same GPU under different indices, or different ones as index 0.
    """
    node = ray.get_runtime_context().get_node_id()
    if device != "cuda":
        return f"{node}/cpu"
    return f"{node}/{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def allocate(nbytes: int, device: str) -> torch.Tensor:
    """A flat uint8 buffer that can be exported.

    CUDA IPC shares whole cudaMalloc segments. Expandable segments are not made by cudaMalloc, so they are off for this
    allocation; the caching allocator then also takes no free block of an existing one. vLLM's sleep mode allocates
    from a pool of its own, which only its own code enters: senders are trainer ranks and never allocate there.
    """
    if device == "cpu":
        return _allocate_shared(nbytes)
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    expandable = "expandable_segments:True" in settings
    if expandable:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    finally:
        if expandable:
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def export(tensor: torch.Tensor) -> Handle:
    """A handle of the whole storage behind `tensor`.

    Raises:
        RuntimeError: this memory cannot be shared; take it from `allocate`.
    """
    storage = tensor.untyped_storage()
    if storage.device.type == "cuda":
        _, arguments = reduce_tensor(_flat(storage))
        return dict(inspect.signature(rebuild_cuda_tensor).bind(*arguments).arguments)
    if storage.data_ptr() not in _files:
        raise RuntimeError("it was not allocated to be shared")
    file = _files[storage.data_ptr()]
    return {"path": f"/proc/{os.getpid()}/fd/{file}", "identity": _identities[file]}


def open_handle(handle: Handle, device: str) -> torch.Tensor:
    """The exported storage as a flat uint8 tensor.

    Memory of another GPU of the node is mapped into the current one if the two have peer access (the CUDA runtime does
    so on opening, also where CUDA_VISIBLE_DEVICES hides the other GPU).

    Raises:
        RuntimeError: it cannot be mapped here.
    """
    if device == "cuda":
        # The index is the sender's name for its GPU. Its kernels are finished before a handle is sent: no event.
        own = {"storage_device": torch.cuda.current_device(), "event_sync_required": False}
        return rebuild_cuda_tensor(**handle | own)
    file = os.open(handle["path"], os.O_RDWR)
    try:
        # The exporter may have closed it since, and the number may be another file's.
        if _identity(file) != handle["identity"]:
            raise RuntimeError("its owner has freed it")
        return _map(file)
    finally:
        os.close(file)


def finish(device: str) -> None:
    """Return when everything launched on the current stream is done, so that other processes see it."""
    if device == "cuda":
        torch.cuda.current_stream().synchronize()


def _allocate_shared(nbytes: int) -> torch.Tensor:
    """Shared memory without a name: torch's own kinds serve only child processes, or leave files when one is killed."""
    file = os.memfd_create("weights")
    os.ftruncate(file, nbytes)
    buffer = _map(file)
    _files[buffer.data_ptr()], _identities[file] = file, _identity(file)
    weakref.finalize(buffer, _forget, buffer.data_ptr())
    return buffer


def _map(file: int) -> torch.Tensor:
    nbytes = os.fstat(file).st_size
    return _flat(torch.UntypedStorage.from_file(f"/proc/self/fd/{file}", shared=True, nbytes=nbytes))


def _identity(file: int) -> tuple[int, int, int]:
    """Device, inode and size."""
    status = os.fstat(file)
    return status.st_dev, status.st_ino, status.st_size


def _forget(address: int) -> None:
    file = _files.pop(address)
    del _identities[file]
    os.close(file)


def _flat(storage: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
