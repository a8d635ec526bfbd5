"""Messages as bytes: packing rectangles into a flat buffer, taking them out again, and the checksum of what travelled.

A checksum is the sum of a message's bytes read as 64-bit integers, modulo 2**64. It finds lost, torn and mixed-up
messages; whether rectangles are the right ones is shown at the start, when both sides compare all readable weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from rl_actors.weight_sync.plan import ALIGNMENT, Part
from rl_actors.weight_sync.shards import Slices


def message_bytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes of a message on the wire, padding included."""
    return -(-numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def window(tensor: torch.Tensor, local: Slices) -> torch.Tensor:
    """The rectangle `local` of a tensor, as a view."""
    for axis, (start, stop) in enumerate(local):
        tensor = tensor.narrow(axis, start, stop - start)
    return tensor


def copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each (target, source) pair; thousands of experts cost a handful of kernels on a GPU."""
    if pairs := list(pairs):
        targets, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(targets, sources)


def checksum(message: torch.Tensor) -> torch.Tensor:
    """int64 scalar, on the message's device: nothing waits for it.

    Args:
        message: uint8, a multiple of 8 bytes. Smaller integers would be summed in a converted copy of twice the size.
    """
    return message.view(torch.int64).sum()


def checksum_parts(parts: Iterable[Part], tensor_of: Callable[[str], torch.Tensor]) -> list[int]:
    """For each rectangle the sum of its elements, read as integers: to compare frozen weights without sending them.

    Element by element, because some kernels (experts on CPU) keep a matrix in another order.
    """
    sums = []
    for part in parts:
        flat = window(tensor_of(part.param), part.local).contiguous().view(-1)
        integers = flat.view(torch.int16 if flat.dtype.itemsize == 2 else torch.int32)
        sums.append(integers.sum(dtype=torch.int64))
    return [int(value) for value in torch.stack(sums).tolist()] if sums else []
