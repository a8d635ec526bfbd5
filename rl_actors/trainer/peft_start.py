"""The adapters of a PEFT folder as ours, exactly or not at all: what `lora.init_from` starts a run with.

PEFT adapts query, key and value (gate and up) one by one, each with its own A; one adapter of Megatron's fused linear
has one A for all. Where their A's are equal it is that A, with their B's in their own rows. Otherwise the A's are put
one below the other, and each B stands in its own rows and columns: the same product, at the sum of the ranks. What the
rank leaves over starts as a fresh adapter does, with B zero. Experts are read as linears of their own or as the fused
parameters of transformers 5 (see `peft_adapter`).

Invariant: scale * B @ A of every adapter equals what PEFT adds to the same weight, to float32 rounding. Nothing here
imports Megatron.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from placement.model_shape import ModelShape
from rl_actors.config import FUSED_PARTS, HUGGING_FACE_NAMES, LoraConfig
from rl_actors.errors import ConfigError
from rl_actors.trainer.hf_adapters import hf_linears
from rl_actors.trainer.peft_adapter import CONFIG, FUSED, WEIGHTS

_PREFIX = "base_model.model."
_EXPERTS = re.compile(r"\.mlp\.experts(\.base_layer)?$")


@dataclass(frozen=True)
class _Piece:
    """One PEFT adapter: `scale * b @ a` is added to the rows `rows` of our weight."""

    rows: tuple[tuple[int, int], ...]
    a: torch.Tensor
    b: torch.Tensor
    scale: float


class PeftFolder:
    """An adapter made by this project or by `peft` on the Hugging Face model.

    Raises:
        ConfigError: it is none, or one that cannot be taken over.
    """

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        self._folder, self._shape = folder, shape
        try:
            self._config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            self._file = safe_open(folder / WEIGHTS, framework="pt")
        except (OSError, ValueError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"lora.init_from {folder} is not a PEFT folder with {CONFIG} and {WEIGHTS}: {reason}"
            ) from error
        self._keys = {key.removesuffix(".lora_A.weight") for key in self._file.keys() if ".lora_A." in key}  # noqa: SIM118
        self._check_kind()
        self._check_tensors()
        self._whole = lru_cache(maxsize=4)(lambda key: self._file.get_tensor(key).float())

    def _check_tensors(self) -> None:
        """A and B of linears are all that is taken over; whatever else the folder holds would be lost."""
        names = set(self._file.keys())
        for name in sorted(names):
            if ".lora_A." not in name and ".lora_B." not in name:
                raise ConfigError(
                    f"lora.init_from {self._folder} holds {name}, which is no A or B of a linear layer and cannot be "
                    "taken over: start from an adapter of linear layers alone"
                )
            other = name.replace(".lora_A.", ".lora_B.") if ".lora_A." in name else name.replace(".lora_B.", ".lora_A.")
            if other not in names:
                raise ConfigError(f"lora.init_from {self._folder} holds {name} but not {other}: bring the whole folder")

    @property
    def scale(self) -> float:
        """Of B @ A, where no pattern says otherwise."""
        return self._scale_of("", int(self._config["r"]))

    def check(self, lora: LoraConfig) -> None:
        """Compare with the run's settings, for the whole model.

        Raises:
            ConfigError: rank, alpha or targets disagree; says what to set.
        """
        if lora.variant == "dora":
            raise ConfigError("lora.init_from cannot start lora.variant=dora: use lora or canonical_lora")
        wanted = _adapters_of(self._shape, lora)
        needed, largest, used = 0, 0, set()
        for name, (out, width) in wanted.items():
            pieces, keys = self._pieces(name, out, width)
            if not pieces:
                target = name.rpartition(".")[2]
                raise ConfigError(
                    f"lora.targets adapts {name}, which lora.init_from {self._folder} does not: leave {target} out of "
                    "lora.targets"
                )
            used |= keys
            times = self._shape.topk if lora.normalize_moe_lora and ".experts." in name else 1
            needed = max(needed, times * len(_stacked(pieces)[0]))
            largest = max(largest, times * max(len(piece.a) for piece in pieces))
        if wanted and (left := sorted(key.removeprefix(_PREFIX) for key in self._keys - used)):
            targets = sorted(_targets_of(left, lora.variant == "canonical_lora"))
            raise ConfigError(
                f"lora.init_from {self._folder} adapts {left[0]}, which lora.targets leaves out: add "
                f"{', '.join(targets) or 'it'} to them"
            )
        if needed > lora.rank:
            fused = (
                ""
                if needed == largest
                else " for its linears have A's of their own, which one adapter of Megatron's "
                "fused linear holds only side by side"
            )
            other = "" if needed == largest else f", or lora.variant=canonical_lora with lora.rank={largest}"
            raise ConfigError(
                f"lora.init_from {self._folder} needs lora.rank={needed} and "
                f"{self._alpha_for(needed, lora.scaling)}, not rank {lora.rank},{fused or ' as it was trained'}{other}"
            )
        root = math.sqrt(lora.rank) if lora.scaling == "rslora" else lora.rank
        if not math.isclose(lora.alpha / root, self.scale, rel_tol=1e-6):
            raise ConfigError(
                f"lora.alpha = {lora.alpha} with lora.rank = {lora.rank} scales adapters by {lora.alpha / root:g}"
                f", those of lora.init_from {self._folder} are scaled by {self.scale:g}: use "
                f"{self._alpha_for(lora.rank, lora.scaling)}"
            )

    def _alpha_for(self, rank: int, scaling: str) -> str:
        """The setting that scales adapters of this rank as the folder's, if a whole alpha does."""
        for other in (scaling, "standard", "rslora"):
            alpha = self.scale * (math.sqrt(rank) if other == "rslora" else rank)
            if alpha > 0.5 and math.isclose(alpha, round(alpha), rel_tol=1e-6):
                return f"lora.alpha={round(alpha)}" + ("" if other == scaling else f" with lora.scaling={other}")
        return f"a lora.rank at which a whole lora.alpha scales by {self.scale:g}"

    def pair(self, name: str, out: int, width: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """A [n, width] and B [out, n] of one of our adapters, float32, such that `scale * B @ A` is what PEFT adds.

        n is the rank that it takes.

        Raises:
            ConfigError: the folder has nothing for it.
        """
        pieces, _ = self._pieces(name, out, width)
        if not pieces:
            raise ConfigError(f"lora.init_from {self._folder} has nothing for {name}: leave it out of lora.targets")
        a, places = _stacked(pieces)
        b = torch.zeros(out, len(a))
        for piece, first in zip(pieces, places, strict=True):
            done = 0
            for start, stop in piece.rows:
                rows = piece.b[done : done + stop - start]
                b[start:stop, first : first + len(piece.a)] = rows * (piece.scale / scale)
                done += stop - start
        return a, b

    def _pieces(self, name: str, out: int, width: int) -> tuple[list[_Piece], set[str]]:
        """The PEFT adapters within one of ours, and their keys."""
        found: dict[str, _Piece] = {}
        for linear in hf_linears(name, out, self._shape):
            key = f"{_PREFIX}{linear.module}"
            if key in self._keys:
                a, b = self._whole(f"{key}.lora_A.weight"), self._whole(f"{key}.lora_B.weight")
                found[key] = _Piece(linear.rows, a, b, self._scale_of(linear.module, len(a)))
        if not found and ".mlp.experts." in name:
            found = self._fused_expert(name, out, width)
        for key, piece in found.items():
            rows = sum(stop - start for start, stop in piece.rows)
            if piece.a.shape[1] != width or piece.b.shape != (rows, len(piece.a)):
                raise ConfigError(
                    f"lora.init_from {self._folder} belongs to another model: {key.removeprefix(_PREFIX)} has A "
                    f"{list(piece.a.shape)} and B {list(piece.b.shape)}, here the weight is {[rows, width]}"
                )
        return list(found.values()), set(found)

    def _fused_expert(self, name: str, out: int, width: int) -> dict[str, _Piece]:
        """One expert's part of the adapter of a fused parameter; the outer of two wrappers may be of either."""
        _, layer, _, _, expert, linear = name.split(".")
        fused = next(ours for ours in FUSED if linear.startswith(ours))
        # An adapter of gate or up alone has its half of the rows.
        first, rows = (out if linear.endswith("_up") else 0), (out if linear == fused else 2 * out)
        block, count = f"model.layers.{layer}.mlp.experts", self._shape.experts
        for key in (f"{_PREFIX}{block}", f"{_PREFIX}{block}.base_layer"):
            if key not in self._keys:
                continue
            a, b = self._whole(f"{key}.lora_A.weight"), self._whole(f"{key}.lora_B.weight")
            if (a.shape[1], b.shape[0]) != (width, rows) or a.shape[0] % count:
                continue
            rank = len(a) // count
            own_a = a[int(expert) * rank : (int(expert) + 1) * rank]
            own_b = b.view(rows, rank, count)[first : first + out, :, int(expert)]
            if linear != fused:  # the other half's columns are zero if each half had an A of its own
                used = own_b.any(dim=0)
                own_a, own_b = own_a[used], own_b[:, used]
            scale = self._scale_of(f"{block}.{FUSED[fused]}", rank)
            return {key: _Piece(((0, out),), own_a, own_b, scale)}
        return {}

    def _scale_of(self, module: str, rank: int) -> float:
        patterns = self._config.get("alpha_pattern") or {}
        matching = (alpha for key, alpha in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
        alpha = next(matching, self._config["lora_alpha"])
        return float(alpha) / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _check_kind(self) -> None:
        unusable = {
            "peft_type": self._config.get("peft_type") != "LORA",
            "use_dora": bool(self._config.get("use_dora")),
            "bias": self._config.get("bias", "none") != "none",
            "modules_to_save": bool(self._config.get("modules_to_save")),
        }
        for setting in (name for name, wrong in unusable.items() if wrong):
            raise ConfigError(
                f"lora.init_from {self._folder} has {setting} = {self._config.get(setting)!r}: only plain LoRA "
                "adapters can be taken over"
            )
        missing = next((name for name in ("r", "lora_alpha") if not self._config.get(name)), None)
        if missing or not self._keys:
            raise ConfigError(
                f"lora.init_from {self._folder} has no {missing or 'LoRA tensors'}: it is no LoRA adapter"
            )


def _stacked(pieces: list[_Piece]) -> tuple[torch.Tensor, list[int]]:
    """The different A's one below the other, and where each piece's begins."""
    different: list[torch.Tensor] = []
    places = []
    for piece in pieces:
        at = next((index for index, a in enumerate(different) if torch.equal(a, piece.a)), len(different))
        if at == len(different):
            different.append(piece.a)
        places.append(sum(len(a) for a in different[:at]))
    return torch.cat(different), places


def _adapters_of(shape: ModelShape, lora: LoraConfig) -> dict[str, tuple[int, int]]:
    """(out, in) of every adapter of a run by name; empty where only the built model knows which layers are dense."""
    if shape.moe_layers not in (0, shape.num_layers):
        return {}
    linears = _linears_of(shape, lora.variant == "canonical_lora")
    return {name: size for name, size in linears if _matches(name, lora)}


def _linears_of(shape: ModelShape, canonical: bool) -> Iterator[tuple[str, tuple[int, int]]]:
    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    ffn = shape.moe_ffn or shape.ffn
    qkv = {"linear_q": query, "linear_k": key_value, "linear_v": key_value}
    gated = {"linear_fc1_gate": ffn, "linear_fc1_up": ffn}
    for layer in range(shape.num_layers):
        attention = f"layers.{layer}.self_attention"
        for name, out in (qkv if canonical else {"linear_qkv": query + 2 * key_value}).items():
            yield f"{attention}.{name}", (out, shape.hidden)
        yield f"{attention}.linear_proj", (shape.hidden, query)
        for block in [f"experts.{expert}." for expert in range(shape.experts)] or [""]:
            for name, out in (gated if canonical else {"linear_fc1": 2 * ffn}).items():
                yield f"layers.{layer}.mlp.{block}{name}", (out, shape.hidden)
            yield f"layers.{layer}.mlp.{block}linear_fc2", (shape.hidden, ffn)


def _targets_of(modules: list[str], canonical: bool) -> set[str]:
    """Which of our targets adapt these modules of Hugging Face."""
    fused = {part: whole for whole, parts in FUSED_PARTS.items() for part in parts}
    names = {HUGGING_FACE_NAMES.get(module.rpartition(".")[2], "") for module in modules} - {""}
    if any(_EXPERTS.search(module) for module in modules):
        names |= {"linear_fc1_gate", "linear_fc1_up", "linear_fc2"}
    return names if canonical else {fused.get(name, name) for name in names}


def _matches(name: str, lora: LoraConfig) -> bool:
    """As `lora.TargetedLoRA.match`: by the last name, or a wildcard on Megatron's path (on CPU and on GPU)."""
    local = re.sub(r"\.experts\.(\d+)\.", r".experts.local_experts.\1.", name)
    grouped = re.sub(r"\.experts\.\d+\.", ".experts.", name)
    paths = [f"decoder.{path}" for path in (local, grouped)]

    def any_of(patterns: tuple[str, ...]) -> bool:
        return any(
            pattern == name.rpartition(".")[2] or re.match(f"^{pattern.replace('*', '(.*)')}$", path)
            for pattern in patterns
            for path in paths
        )

    return any_of(lora.targets) and not any_of(lora.exclude)
