"""The trainer's state on disk, the same for every layout: pieces of full tensors by global adapter name.

`trainer/state.json` says what was trained: LoRA settings, model sizes, optimizer steps, and the shape of every
adapter. `trainer/rank-00003.safetensors` holds the pieces that rank 3 owned. A piece is a run of elements
`start:stop` of one shard, and the shard is part `rank` of `size` of an axis of the full tensor (see
`lora.Slice`); tensor parallelism chooses the shard, the distributed optimizer the run. Three tensors belong to each
piece: the fp32 master weight and Adam's two moments.

Invariant: pieces of one tensor are disjoint and together cover it; a reader that finds otherwise says what is missing.
Nothing here imports Megatron, so a checkpoint can be read anywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open

from placement.model_shape import ModelShape
from rl_actors.digests import Digest, write_bytes
from rl_actors.errors import CheckpointError
from rl_actors.json_object import json_object, reason
from rl_actors.lora_config import LoraConfig
from rl_actors.trainer.safetensors_stream import SafetensorsWriter

FORMAT = 1
TRAINER, STATE = "trainer", "state.json"

Part = Literal["A", "B", "M"]
Kind = Literal["weight", "exp_avg", "exp_avg_sq"]
KINDS: tuple[Kind, ...] = ("weight", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Cut:
    """Where a piece lies in its full tensor.

    Attributes:
        shape: of the full tensor.
        axis, rank, size, gated: the shard, as in `lora.Slice`.
        start, stop: elements of the flattened shard.
    """

    shape: tuple[int, int]
    axis: int
    rank: int
    size: int
    gated: bool
    start: int
    stop: int

    def place(self, piece: torch.Tensor, full: torch.Tensor) -> None:
        """Write the flat piece to its place in the full tensor."""
        flat = full.view(-1)
        if self.size == 1:
            flat[self.start : self.stop] = piece
            return
        numbers = torch.arange(full.numel()).view(self.shape)
        halves = numbers.chunk(2, dim=self.axis) if self.gated else (numbers,)
        shard = torch.cat([half.chunk(self.size, dim=self.axis)[self.rank] for half in halves], dim=self.axis)
        flat[shard.reshape(-1)[self.start : self.stop]] = piece


@dataclass(frozen=True)
class OwnedPiece:
    """What one rank writes of one A, B or M. Tensors are flat, float32; the moments are empty before the first step."""

    name: str
    part: Part
    cut: Cut
    tensors: dict[Kind, torch.Tensor]


@dataclass(frozen=True)
class TrainerState:
    """What `state.json` holds.

    Attributes:
        base: folder of the Hugging Face model that was adapted, as the configuration names it.
        dtype: of the model, "float32" or "bfloat16".
        lora: settings of the adapters.
        model: sizes of the model.
        steps: optimizer steps made; the learning rate is a function of it and the configuration.
        layout: sizes of the parallel axes it was written at.
        adapters: for each adapter the shapes of "A" and "B", of DoRA's "M", and the "scale" of B @ A.
        ranks: how many rank files there are.
    """

    base: str
    dtype: Literal["float32", "bfloat16"]
    lora: LoraConfig
    model: ModelShape
    steps: int
    layout: dict[str, int]
    adapters: dict[str, dict[str, Any]]
    ranks: int

    def write(self, folder: Path) -> Digest:
        """Write `folder`/trainer/state.json."""
        tree = {"format": FORMAT, **asdict(self), "lora": self.lora.model_dump(mode="json")}
        return write_bytes(folder / TRAINER / STATE, json.dumps(tree, indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> TrainerState:
        """Read `folder`/trainer/state.json.

        Raises:
            CheckpointError: it is missing, damaged, or of another format.
        """
        path = folder / TRAINER / STATE
        try:
            tree = json_object(path.read_bytes())
            if tree.pop("format") != FORMAT:
                raise CheckpointError(f"{path} has another format than {FORMAT}: it needs another version of rl-actors")
            _ADAPTERS.validate_python(tree["adapters"])
            return _STATE.validate_python(tree)
        except OSError as error:
            raise CheckpointError(f"{folder} is not a checkpoint: it has no readable {TRAINER}/{STATE}") from error
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{path} is damaged: {reason(error)}") from error


class _Adapter(TypedDict):
    """What `TrainerState.adapters` says of each."""

    A: tuple[int, int]
    B: tuple[int, int]
    M: NotRequired[tuple[int, int]]
    scale: float


_STATE, _ADAPTERS = TypeAdapter(TrainerState), TypeAdapter(dict[str, _Adapter])


def rank_file(folder: Path, rank: int) -> Path:
    return folder / TRAINER / f"rank-{rank:05d}.safetensors"


def write_rank_file(folder: Path, rank: int, pieces: Iterable[OwnedPiece]) -> Digest:
    """Write the pieces that `rank` owns, in host memory; a rank that owns none writes a file without tensors."""
    cuts: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    for piece in pieces:
        key, cut = f"{piece.name}.{piece.part}", piece.cut
        cuts[key] = [*cut.shape, cut.axis, cut.rank, cut.size, cut.gated, cut.start, cut.stop]
        for kind, tensor in piece.tensors.items():
            tensors[f"{key}.{kind}"] = tensor
    layout = {name: (torch.float32, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with SafetensorsWriter(rank_file(folder, rank), layout, {"format": str(FORMAT), "cuts": json.dumps(cuts)}) as file:
        for name, tensor in tensors.items():
            file.write(name, tensor)
    return file.digest


class ShardReader:
    """Full tensors from the files of all ranks, one at a time."""

    def __init__(self, folder: Path) -> None:
        """Open every rank's file of the checkpoint `folder`.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        self.state = TrainerState.read(folder)
        self.folder = folder
        self._files: list[Any] = []
        self._pieces: dict[str, list[tuple[int, Cut]]] = {}
        for rank in range(self.state.ranks):
            path = rank_file(folder, rank)
            if not path.is_file():
                raise CheckpointError(f"checkpoint {folder} lacks {TRAINER}/{path.name}")
            try:
                file = safe_open(path, framework="pt")
                cuts = json_object((file.metadata() or {})["cuts"])
                for key, (rows, columns, axis, part, size, gated, start, stop) in cuts.items():
                    cut = Cut((rows, columns), axis, part, size, gated, start, stop)
                    self._pieces.setdefault(key, []).append((rank, cut))
            except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{path} is damaged: {error}") from error
            self._files.append(file)

    def full(self, name: str, part: Part, kind: Kind = "weight") -> torch.Tensor:
        """A, B or M of an adapter, or a moment of it, whole: float32 [rank, in], [out, rank] or [out, 1], on CPU.

        Raises:
            CheckpointError: there is no such adapter, or pieces of it are missing.
        """
        if name not in self.state.adapters:
            raise CheckpointError(f"checkpoint {self.folder} has no adapter {name}")
        shape = tuple(self.state.adapters[name][part])
        pieces = self._pieces.get(f"{name}.{part}", [])
        covered = sum(cut.stop - cut.start for _, cut in pieces if cut.shape == shape)
        if covered != math.prod(shape):
            raise CheckpointError(
                f"checkpoint {self.folder} holds {covered} of the {math.prod(shape)} elements of {name}.{part}"
            )
        full = torch.empty(shape, dtype=torch.float32)
        for rank, cut in pieces:
            try:
                cut.place(self._files[rank].get_tensor(f"{name}.{part}.{kind}"), full)
            except (SafetensorError, RuntimeError) as error:
                path = rank_file(self.folder, rank)
                raise CheckpointError(f"{path} is damaged at {name}.{part}.{kind}: {error}") from error
        return full
