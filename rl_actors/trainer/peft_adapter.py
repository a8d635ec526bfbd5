"""A checkpoint's adapters as a PEFT folder, streamed name by name.

Linears get their A and their rows of B. The experts of transformers 5 are two fused parameters,
`mlp.experts.gate_up_proj` [experts, 2 * ffn, hidden] and `down_proj` [experts, hidden, ffn]; PEFT adapts them with
`target_parameters` and one pair of matrices for all experts of a layer (`peft.tuners.lora.ParamWrapper`, PEFT 0.21):

    lora_A [experts * r, in], row e * r + k      lora_B [out, experts * r], column k * experts + e

which holds one adapter for each expert, exactly; gate and up with adapters of their own are one of twice the rank.
`down_proj` is the outer wrapper (`experts.lora_A`) and `gate_up_proj` the inner one (`experts.base_layer.lora_A`). vLLM
reads the same names. Values are cast to the model's type, once.
"""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_actors.digests import Digest, write_bytes
from rl_actors.errors import CheckpointError
from rl_actors.lora_config import FUSED_PARTS
from rl_actors.trainer.hf_adapters import HFLinear, hf_linears
from rl_actors.trainer.safetensors_stream import SafetensorsWriter
from rl_actors.trainer.shard_files import ShardReader, TrainerState

logger = logging.getLogger(__name__)

ADAPTER, NO_ADAPTER = "adapter", "adapter-not-written.txt"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FUSED = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}


@dataclass(frozen=True)
class _Linear:
    """The PEFT tensors of one linear.

    Attributes:
        key: PEFT's name without `.lora_A.weight`.
        target: the module as adapter_config.json names it, in full.
        adapter: its name; `linear` says which rows of it are meant.
        rank: of the PEFT adapter.
        scale: of B @ A.
    """

    key: str
    target: str
    adapter: str
    linear: HFLinear
    rank: int
    scale: float
    width: int
    rows: int
    has_magnitude: bool

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"lora_A.weight": (self.rank, self.width)}
        shapes["lora_B.weight"] = (self.rows, self.rank)
        return {**shapes, "lora_magnitude_vector": (self.rows,)} if self.has_magnitude else shapes

    def tensors(self, reader: ShardReader) -> Iterator[tuple[str, torch.Tensor]]:
        yield "lora_A.weight", reader.full(self.adapter, "A")
        yield "lora_B.weight", self.linear.of(reader.full(self.adapter, "B"))
        if self.has_magnitude:
            yield "lora_magnitude_vector", self.linear.of(reader.full(self.adapter, "M"))[:, 0]


@dataclass(frozen=True)
class _Experts:
    """The PEFT tensors of one fused parameter of all experts of a layer.

    Gate and up with an adapter each are one adapter of twice the rank: A on A, and B beside B, each in its own rows.

    Attributes:
        key, target: as in `_Linear`, of the parameter.
        parts: for each expert its adapter, or those of gate and up; None where it has none.
        rank, scale: of one expert in PEFT.
        width, rows: of one expert's weight.
    """

    key: str
    target: str
    parts: tuple[tuple[str | None, ...], ...]
    rank: int
    scale: float
    width: int
    rows: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        columns = len(self.parts) * self.rank
        return {"lora_A.weight": (columns, self.width), "lora_B.weight": (self.rows, columns)}

    def tensors(self, reader: ShardReader) -> Iterator[tuple[str, torch.Tensor]]:
        yield "lora_A.weight", torch.cat([self._a(reader, names) for names in self.parts])
        stacked = torch.stack([self._b(reader, names) for names in self.parts])
        yield "lora_B.weight", stacked.view(len(self.parts), -1).t().reshape(self.shapes()["lora_B.weight"])

    def _a(self, reader: ShardReader, names: tuple[str | None, ...]) -> torch.Tensor:
        rank = self.rank // len(names)
        return torch.cat([reader.full(name, "A") if name else torch.zeros(rank, self.width) for name in names])

    def _b(self, reader: ShardReader, names: tuple[str | None, ...]) -> torch.Tensor:
        shape = (self.rows // len(names), self.rank // len(names))
        return torch.block_diag(*(reader.full(name, "B") if name else torch.zeros(shape) for name in names))


def obstacle(state: TrainerState) -> str | None:
    """Why PEFT cannot hold these adapters, or None if it can."""
    dense = [name for name in state.adapters if ".mlp.linear_fc" in name]
    if state.model.is_moe and dense:
        return (
            f"PEFT reads targets such as those of {dense[0]} as experts when a model has both dense and expert layers; "
            "export the merged model instead (--format merged-hf)"
        )
    if state.lora.variant == "dora" and any(_is_expert(name) for name in state.adapters):
        return "PEFT has no DoRA for experts; export the merged model instead (--format merged-hf)"
    try:
        for _ in _entries(state):
            pass
    except CheckpointError as error:
        return str(error)
    return None


def _is_expert(name: str) -> bool:
    return ".experts." in name and ".shared_experts." not in name


def write(
    reader: ShardReader, folder: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Digest]:
    """Write adapter_config.json and adapter_model.safetensors into `folder`.

    Args:
        progress: called with the tensors written and the tensors in all.

    Returns:
        The digest of each file by its name.

    Raises:
        CheckpointError: PEFT cannot hold these adapters, or the checkpoint is damaged.
    """
    state = reader.state
    if reason := obstacle(state):
        raise CheckpointError(reason)
    folder.mkdir(parents=True, exist_ok=True)
    entries = list(_entries(state))
    config = write_bytes(folder / CONFIG, json.dumps(_config(state, entries), indent=2).encode())
    dtype = getattr(torch, state.dtype)
    layout = {f"{entry.key}.{name}": (dtype, shape) for entry in entries for name, shape in entry.shapes().items()}
    done = 0
    with SafetensorsWriter(folder / WEIGHTS, layout) as file:
        for entry in entries:
            for name, tensor in entry.tensors(reader):
                file.write(f"{entry.key}.{name}", tensor)
                done += 1
                progress(done, len(layout))
    return {CONFIG: config, WEIGHTS: file.digest}


def write_beside(checkpoint: Path) -> dict[str, Digest]:
    """Add the PEFT folder to a checkpoint whose ranks have all written; where PEFT cannot hold it, a file says why.

    Returns:
        The digest of each file by path relative to `checkpoint`.
    """
    reader = ShardReader(checkpoint)
    if reason := obstacle(reader.state):
        logger.warning("no PEFT folder beside the checkpoint: %s", reason)
        return {NO_ADAPTER: write_bytes(checkpoint / NO_ADAPTER, f"{reason}\n".encode())}
    return {f"{ADAPTER}/{name}": digest for name, digest in write(reader, checkpoint / ADAPTER).items()}


def _entries(state: TrainerState) -> Iterator[_Linear | _Experts]:
    by_block: dict[str, dict[str, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    for name, entry in state.adapters.items():
        if _is_expert(name):
            _, layer, _, _, expert, kind = name.split(".")
            by_block[f"model.layers.{layer}.mlp.experts"][kind][int(expert)] = name
            continue
        (rank, width), (out, _) = entry["A"], entry["B"]
        for linear in hf_linears(name, out, state.model):
            rows = sum(stop - start for start, stop in linear.rows)
            key = f"base_model.model.{linear.module}"
            yield _Linear(key, linear.module, name, linear, rank, entry["scale"], width, rows, "M" in entry)
    for block, kinds in by_block.items():
        for linear_name in FUSED:
            whole, split = (linear_name,), FUSED_PARTS.get(linear_name, ())
            if not {*whole, *split} & kinds.keys():
                continue
            parts = whole if linear_name in kinds else split
            names = tuple(tuple(kinds[part].get(e) for part in parts) for e in range(state.model.experts))
            one = state.adapters[next(name for expert in names for name in expert if name)]
            (rank, width), (out, _) = one["A"], one["B"]
            inner = linear_name == "linear_fc1" and "linear_fc2" in kinds
            yield _Experts(
                f"base_model.model.{block}" + (".base_layer" if inner else ""),
                f"{block}.{FUSED[linear_name]}",
                names,
                rank * len(parts),
                one["scale"],
                width,
                out * len(parts),
            )


def _config(state: TrainerState, entries: list[_Linear | _Experts]) -> dict[str, Any]:
    """adapter_config.json: short names where all layers are adapted alike, full ones otherwise."""
    modules = [entry.target for entry in entries if isinstance(entry, _Linear)]
    parameters = [entry for entry in entries if isinstance(entry, _Experts)]
    rank_pattern, alpha_pattern = {}, {}
    # Other values than the usual come from lora.normalize_moe_lora, and where gate and up are put together.
    for rank, scale in {(entry.rank, entry.scale) for entry in parameters}:
        alpha = _alpha(rank, scale, state)
        if (rank, alpha) == (state.lora.rank, state.lora.alpha):
            continue
        for suffix in _short([entry.target for entry in parameters if entry.rank == rank], state):
            rank_pattern[suffix], alpha_pattern[suffix] = rank, alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": state.base,
        "r": state.lora.rank,
        "lora_alpha": state.lora.alpha,
        "use_rslora": state.lora.scaling == "rslora",
        "use_dora": state.lora.variant == "dora",
        "lora_dropout": 0.0,  # PEFT has none on parameters, and none is wanted for inference
        "bias": "none",
        "inference_mode": True,
        "target_modules": _short(modules, state),
        "target_parameters": _short([entry.target for entry in parameters], state) or None,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
    }


def _alpha(rank: int, scale: float, state: TrainerState) -> float:
    """The alpha with which PEFT scales B @ A by `scale`."""
    alpha = scale * (math.sqrt(rank) if state.lora.scaling == "rslora" else rank)
    return round(alpha) if math.isclose(alpha, round(alpha)) else alpha


def _short(targets: list[str], state: TrainerState) -> list[str]:
    """Names without their layer, if every layer has them; PEFT matches by suffix."""
    suffixes: dict[str, int] = defaultdict(int)
    for target in targets:
        suffixes[target.split(".", 3)[3]] += 1
    if all(count == state.model.num_layers for count in suffixes.values()):
        return sorted(suffix if "experts" in suffix else suffix.rpartition(".")[2] for suffix in suffixes)
    return sorted(targets)
