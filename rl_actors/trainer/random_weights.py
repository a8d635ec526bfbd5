"""Weights of a model that has none: made on the device, from the seed alone.

Invariant: an element is a function of the seed, its Hugging Face tensor's name, its row and its column, so the model is
the same in every layout and on every device. Matrices are uniform with the standard deviation that Hugging Face
models start from, norms are one, biases zero.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch

from rl_actors.errors import ConfigError
from rl_actors.weight_sync.holdings import TrainerShards
from rl_actors.weight_sync.shards import Box
from rl_actors.weight_sync.wire import window

if TYPE_CHECKING:
    from rl_actors.trainer.model import TrainerModel

STANDARD_DEVIATION = 0.02
ROWS_AT_ONCE = 4096
"""Bounds the scratch memory: an embedding is filled piece by piece."""


@torch.no_grad()
def fill(model: TrainerModel, seed: int) -> None:
    """Give every base weight of this rank its value.

    Raises:
        ConfigError: a weight has no Hugging Face tensor that would name it.
    """
    shards = TrainerShards(model)
    held = shards.holdings()
    if held.unread:
        raise ConfigError(f"model.random_weights cannot fill {', '.join(held.unread[:3])}: use a folder with weights")
    for tensor in shards.tensors.values():
        tensor.zero_()  # padding of the vocabulary
    for piece in held.adapted + held.fixed:
        _fill_box(window(shards.tensors[piece.param], piece.local), piece.box, seed)


def _fill_box(target: torch.Tensor, box: Box, seed: int) -> None:
    if target.dim() == 1:
        target.fill_(1.0 if "norm" in box.name else 0.0)
        return
    (first, last), columns = box.slices
    for start in range(first, last, ROWS_AT_ONCE):
        stop = min(start + ROWS_AT_ONCE, last)
        target[start - first : stop - first] = elements(box.name, (start, stop), columns, seed, target.device)


def elements(
    name: str, rows: tuple[int, int], columns: tuple[int, int], seed: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """float32 [rows, columns] of a rectangle of a tensor.

    Row and column are mixed as by SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    2014), in int64 arithmetic that wraps; the highest 24 bits, with their sign, are the value.
    """
    key = _signed(int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "big"))
    row = torch.arange(*rows, device=device) * _signed(0x9E3779B97F4A7C15) + key
    column = torch.arange(*columns, device=device) * _signed(0xD1B54A32D192ED03)
    mixed = row[:, None] + column[None, :]
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed.bitwise_xor_(_shifted(mixed, shift)).mul_(_signed(factor))
    mixed.bitwise_xor_(_shifted(mixed, 31))
    return (mixed >> 40).float() * (STANDARD_DEVIATION * math.sqrt(3.0) / 2**23)


def _shifted(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, with zeros from the left: torch's own shift would repeat the sign."""
    return (numbers >> bits).bitwise_and_(2 ** (64 - bits) - 1)


def _signed(number: int) -> int:
    """The same 64 bits as a signed number, which is what torch takes."""
    return number - 2**64 if number >= 2**63 else number
