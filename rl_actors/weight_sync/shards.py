"""Where the parts of Hugging Face tensors lie in Megatron's and vLLM's fused, sharded parameters. Pure.

The common language is a box: a rectangle of a Hugging Face tensor. A `Piece` says that one box lies, unchanged and
unpermuted, in one rectangle of a local parameter. Megatron keeps query, key and value rows group by group; vLLM keeps
all query rows, then all key rows, then all value rows. Both become lists of pieces, and nothing else needs to know.

Invariant: box and local rectangle have the same shape (a local parameter may have leading axes, such as the expert
number, where its rectangle is one wide).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Slices = tuple[tuple[int, int], ...]
"""(start, stop) for each axis."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of the Hugging Face tensor `name`."""

    name: str
    slices: Slices


@dataclass(frozen=True, slots=True)
class Piece:
    """`box` lies in `local` of the local parameter `param`."""

    box: Box
    param: str
    local: Slices


@dataclass(frozen=True)
class Heads:
    """Attention sizes of the whole model: query heads, key-value heads, and channels of one head."""

    query: int
    key_value: int
    size: int


def volume(slices: Slices) -> int:
    """Number of elements."""
    return math.prod(stop - start for start, stop in slices)


def intersect(first: Slices, second: Slices) -> Slices | None:
    """The common rectangle, or None if it is empty."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return common if all(start < stop for start, stop in common) else None


def locate(piece: Piece, part: Slices) -> Slices:
    """Where a part of the piece's box lies in the local parameter."""
    lead = len(piece.local) - len(part)
    moved = tuple(
        (local[0] + start - box[0], local[0] + stop - box[0])
        for local, box, (start, stop) in zip(piece.local[lead:], piece.box.slices, part, strict=True)
    )
    return piece.local[:lead] + moved


def whole(param: str, name: str, shape: tuple[int, ...]) -> list[Piece]:
    """A parameter that every rank holds whole, such as a norm."""
    full = tuple((0, size) for size in shape)
    return [Piece(Box(name, full), param, full)]


def rows(param: str, name: str, shape: tuple[int, ...], rank: int, size: int, limit: int | None = None) -> list[Piece]:
    """Split on the first axis: part `rank` of `size`; `shape` is the local one.

    Args:
        limit: rows of the Hugging Face tensor, where the local parameter is padded beyond them (vocabulary).
    """
    first = rank * shape[0]
    stop = min(first + shape[0], size * shape[0] if limit is None else limit)
    if stop <= first:
        return []
    rest = tuple((0, length) for length in shape[1:])
    return [Piece(Box(name, ((first, stop), *rest)), param, ((0, stop - first), *rest))]


def columns(param: str, name: str, shape: tuple[int, ...], rank: int) -> list[Piece]:
    """Split on the last axis (row-parallel linears: their input is cut)."""
    out, width = shape
    return [Piece(Box(name, ((0, out), (rank * width, (rank + 1) * width))), param, ((0, out), (0, width)))]


def stacked_rows(param: str, names: list[str], shape: tuple[int, ...], rank: int) -> list[Piece]:
    """Equal tensors below each other, each split on its first axis: gate and up, in Megatron and in vLLM."""
    height = shape[0] // len(names)
    return [
        _row_block(param, name, index * height, rank * height, height, shape[1] if len(shape) == 2 else 0)
        for index, name in enumerate(names)
    ]


def megatron_qkv(param: str, names: dict[str, str], heads: Heads, width: int, rank: int, size: int) -> list[Piece]:
    """Megatron's linear_qkv: for each key-value head its query heads, then itself, then its value head.

    Args:
        names: Hugging Face names under "q", "k" and "v".
        width: input channels; 1-dimensional parameters (biases) have no such axis and give 0.
    """
    per_group = heads.query // heads.key_value
    local_groups = heads.key_value // size
    pieces = []
    for group in range(local_groups):
        row = group * (per_group + 2) * heads.size
        whole_group = rank * local_groups + group
        for part, count in (("q", per_group), ("k", 1), ("v", 1)):
            height = count * heads.size
            pieces.append(_row_block(param, names[part], row, whole_group * height, height, width))
            row += height
    return pieces


def vllm_qkv(param: str, names: dict[str, str], heads: Heads, width: int, rank: int, size: int) -> list[Piece]:
    """vLLM's qkv_proj: the rank's query rows, then key rows, then value rows.

    With more ranks than key-value heads each head is held by several ranks.
    """
    query_rows = heads.query // size * heads.size
    local_heads = max(1, heads.key_value // size)
    first_head = rank * local_heads if size <= heads.key_value else rank // (size // heads.key_value)
    head_rows = local_heads * heads.size
    blocks = [
        ("q", 0, rank * query_rows, query_rows),
        ("k", query_rows, first_head * heads.size, head_rows),
        ("v", query_rows + head_rows, first_head * heads.size, head_rows),
    ]
    return [_row_block(param, names[part], row, source, height, width) for part, row, source, height in blocks]


def expert(pieces: list[Piece], param: str, index: int) -> list[Piece]:
    """Move the pieces of one expert's matrix into a parameter that stacks experts on its first axis."""
    return [Piece(piece.box, param, ((index, index + 1), *piece.local)) for piece in pieces]


def _row_block(param: str, name: str, local_row: int, row: int, height: int, width: int) -> Piece:
    rest: Slices = ((0, width),) if width else ()
    return Piece(Box(name, ((row, row + height), *rest)), param, ((local_row, local_row + height), *rest))
