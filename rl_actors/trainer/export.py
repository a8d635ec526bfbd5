"""A checkpoint as a plain Hugging Face model: base weights with the adapters merged in.

Reads the layout-free files and the base folder only: no Megatron, no GPU, the memory of one tensor. Invariant: each
adapted weight is W + scale * B @ A (with DoRA's row lengths) in float32 from the fp32 masters, cast once to the base's
type; every other tensor and file is the base's own. The folder is whole or absent: it is written beside its place and
renamed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from placement.model_shape import ModelShape
from rl_actors.errors import CheckpointError, ConfigError
from rl_actors.trainer import peft_adapter
from rl_actors.trainer.hf_adapters import HFLinear, hf_linears
from rl_actors.trainer.safetensors_stream import TYPES, SafetensorsWriter
from rl_actors.trainer.shard_files import ShardReader

Progress = Callable[[int, int], None]
"""Called with what is done and what there is in all."""

_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".bin.index.json")


def _silent(done: int, total: int) -> None:
    pass


def export_peft(checkpoint: Path, out: Path, progress: Progress = _silent) -> None:
    """Write the checkpoint's adapters as a PEFT folder at `out`, which must not be there yet.

    Raises:
        CheckpointError: the checkpoint is damaged, or PEFT cannot hold its adapters.
        ConfigError: `out` exists.
    """
    reader = ShardReader(checkpoint)
    _whole_or_absent(out, lambda folder: peft_adapter.write(reader, folder, progress))


def export_merged(base: Path, checkpoint: Path, out: Path, progress: Progress = _silent) -> None:
    """Write the merged model at `out`, which must not be there yet, in the base's own safetensors shards.

    Args:
        base: folder of the Hugging Face model that was adapted.
        checkpoint: the folder that holds `trainer/`.
        progress: called with tensors done and tensors in all.

    Raises:
        CheckpointError: the checkpoint is damaged or belongs to another model than `base`.
        ConfigError: `base` is no model folder with safetensors, or `out` exists.
    """
    reader = ShardReader(checkpoint)
    _check_base(base, reader)
    shards = sorted(base.glob("*.safetensors"))
    if not shards:
        raise ConfigError(f"{base} has no *.safetensors files to merge the adapters into")
    merger = _Merger(reader)
    merger.check_names(base, shards)

    def write(folder: Path) -> None:
        done = 0
        for shard in shards:
            done = _write_shard(shard, folder / shard.name, merger, done, progress)
        _copy_rest(base, folder)

    _whole_or_absent(out, write)


class _Merger:
    """Knows the adapter of each weight and adds it."""

    def __init__(self, reader: ShardReader) -> None:
        self._reader = reader
        self.adapted: dict[str, tuple[str, HFLinear]] = {
            linear.weight: (name, linear)
            for name, entry in reader.state.adapters.items()
            for linear in hf_linears(name, entry["B"][0], reader.state.model)
        }
        self.total = 0

    def check_names(self, base: Path, shards: list[Path]) -> None:
        """Every adapted weight must be in the base, with the shape that the adapter has."""
        left = set(self.adapted)
        for shard in shards:
            file = _open(shard)
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                self.total += 1
                if name in left:
                    self._check_shape(base, name, tuple(file.get_slice(name).get_shape()))
                    left.discard(name)
        if left:
            raise CheckpointError(f"the base model {base} has no tensor {min(left)}, which the checkpoint adapts")

    def _check_shape(self, base: Path, weight: str, shape: tuple[int, ...]) -> None:
        name, linear = self.adapted[weight]
        wanted = (sum(stop - start for start, stop in linear.rows), self._reader.state.adapters[name]["A"][1])
        if shape != wanted:
            raise CheckpointError(
                f"{weight} is {list(shape)} in {base} and {list(wanted)} in the checkpoint: it is another model"
            )

    def merge(self, weight: str, tensor: torch.Tensor) -> torch.Tensor:
        """The merged weight in float32, or the tensor itself if nothing adapts it."""
        if weight not in self.adapted:
            return tensor
        name, linear = self.adapted[weight]
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise CheckpointError(f"{weight} is of type {tensor.dtype}, which adapters cannot be merged into")
        a, b = self._reader.full(name, "A"), linear.of(self._reader.full(name, "B"))
        entry = self._reader.state.adapters[name]
        merged = tensor.float().addmm_(b, a, alpha=entry["scale"])
        if "M" in entry:
            lengths = linear.of(self._reader.full(name, "M"))
            merged.mul_(lengths / torch.linalg.vector_norm(merged, dim=1, keepdim=True))
        return merged


def _check_base(base: Path, reader: ShardReader) -> None:
    shape, saved = ModelShape.from_folder(base), reader.state.model
    if shape != saved:
        raise CheckpointError(
            f"the checkpoint {reader.folder} belongs to another model than {base}: it was trained on {saved}, "
            f"and the folder holds {shape}"
        )


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is not a readable safetensors file: {error}") from error


def _write_shard(source: Path, target: Path, merger: _Merger, done: int, progress: Progress) -> int:
    file = _open(source)
    names = sorted(file.keys())
    layout = {}
    for name in names:
        piece = file.get_slice(name)
        layout[name] = (TYPES[piece.get_dtype()], tuple(piece.get_shape()))
    with SafetensorsWriter(target, layout, file.metadata()) as out:
        for name in names:
            out.write(name, merger.merge(name, file.get_tensor(name)))
            done += 1
            progress(done, merger.total)
    return done


def _copy_rest(base: Path, folder: Path) -> None:
    """Config, tokenizer, chat template: everything that holds no weights."""
    for path in sorted(base.iterdir()):
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_WEIGHT_FILES):
            shutil.copyfile(path, folder / path.name)
        elif path.is_dir() and path.name == "additional_chat_templates":
            shutil.copytree(path, folder / path.name)


def _whole_or_absent(out: Path, write: Callable[[Path], object]) -> None:
    if out.exists():
        raise ConfigError(f"{out} exists already: give a folder that is not there yet")
    out.parent.mkdir(parents=True, exist_ok=True)
    writing = out.parent / f".writing-{out.name}"
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir()
    try:
        write(writing)
        writing.rename(out)
    finally:
        shutil.rmtree(writing, ignore_errors=True)
