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

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from placement.model_shape import ModelShape
from rl_actors.errors import ConfigError, shown
from rl_actors.json_object import json_object
from rl_actors.lora_config import FUSED_PARTS, HUGGING_FACE_NAMES, LoraConfig
from rl_actors.targets import adapted_linears
from rl_actors.trainer.hf_adapters import hf_linears
from rl_actors.trainer.peft_adapter import CONFIG, FUSED, WEIGHTS

_PREFIX = "base_model.model."
_EXPERTS = re.compile(r"\.mlp\.experts(\.base_layer)?$")


def _regular(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"no regular expression: {error}") from error
    return pattern


_Rank = Annotated[int, Field(gt=0, le=2**20)]
_Alpha = Annotated[float, Field(gt=0, le=2**20)]
_Pattern = Annotated[str, AfterValidator(_regular)]


class _Settings(BaseModel):
    """What adapter_config.json says about how much its tensors add, in the types that `peft` writes."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    peft_type: str
    r: _Rank
    lora_alpha: _Alpha
    use_rslora: bool | None = None
    rank_pattern: dict[_Pattern, _Rank] | None = None
    alpha_pattern: dict[_Pattern, _Alpha] | None = None
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None


_OTHER_KINDS = ("use_dora", "modules_to_save", "layer_replication", "use_qalora", "alora_invocation_tokens")
"""Settings of adapters that add something else than scale * B @ A to every token."""


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
            config = json_object((folder / CONFIG).read_bytes())
            self._file = safe_open(folder / WEIGHTS, framework="pt")
        except (OSError, ValueError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"lora.init_from {folder} is not a PEFT folder with {CONFIG} and {WEIGHTS}: {reason}"
            ) from error
        self._config = self._read_settings(config)
        self._keys = {key.removesuffix(".lora_A.weight") for key in self._file.keys() if ".lora_A." in key}  # noqa: SIM118
        if not self._keys:
            raise ConfigError(f"lora.init_from {folder} has no LoRA tensors: it is no LoRA adapter")
        self._check_tensors()
        self._whole = lru_cache(maxsize=4)(self._read_tensor)

    def _read_settings(self, config: dict[str, Any]) -> _Settings:
        unusable = {name: config.get(name) for name in _OTHER_KINDS if config.get(name)}
        unusable |= {"peft_type": config.get("peft_type")} if config.get("peft_type") != "LORA" else {}
        unusable |= {"bias": config["bias"]} if config.get("bias", "none") != "none" else {}
        for setting, value in unusable.items():
            raise ConfigError(
                f"lora.init_from {self._folder} has {setting} = {shown(value)}: only plain LoRA adapters can be taken "
                "over"
            )
        for name in ("r", "lora_alpha"):
            if not config.get(name):
                raise ConfigError(f"lora.init_from {self._folder} has no {name}: it is no LoRA adapter")
        try:
            return _Settings.model_validate(config)
        except ValidationError as error:
            fault = error.errors()[0]
            where, message = str(fault["loc"][0]), fault["msg"].removeprefix("Value error, ")
            raise ConfigError(
                f"lora.init_from {self._folder}: {where} in {CONFIG} cannot be {shown(config[where])} "
                f"({message[0].lower()}{message[1:]}): bring the file that `peft` wrote"
            ) from error

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
            a, b = (self._file.get_slice(one).get_shape() for one in (name, other))
            if ".lora_A." in name and (len(a) != 2 or len(b) != 2 or a[0] != b[1] or 0 in (*a, *b)):
                raise ConfigError(
                    f"lora.init_from {self._folder} holds {name} {a} and B {b}, which are no matrices A [rank, in] and "
                    "B [out, rank]: bring the whole folder"
                )

    def _read_tensor(self, name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError, TypeError, AttributeError) as error:
            raise ConfigError(f"lora.init_from {self._folder}: {name} cannot be read: {error}") from error
        if not tensor.is_floating_point():
            raise ConfigError(f"lora.init_from {self._folder}: {name} is of type {tensor.dtype}, not of real numbers")
        tensor = tensor.float()
        if not tensor.isfinite().all():
            raise ConfigError(
                f"lora.init_from {self._folder}: {name} holds NaN or infinity, which training cannot go on from: take "
                "an earlier checkpoint's adapter"
            )
        return tensor

    @property
    def scale(self) -> float:
        """Of B @ A, where no pattern says otherwise."""
        return self._scale_of("", self._config.r)

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
        patterns = self._config.alpha_pattern or {}
        matching = (alpha for key, alpha in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
        alpha = next(matching, self._config.lora_alpha)
        return alpha / (math.sqrt(rank) if self._config.use_rslora else rank)


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
    return {} if shape.moe_layers not in (0, shape.num_layers) else adapted_linears(shape, lora)


def _targets_of(modules: list[str], canonical: bool) -> set[str]:
    """Which of our targets adapt these modules of Hugging Face."""
    fused = {part: whole for whole, parts in FUSED_PARTS.items() for part in parts}
    names = {HUGGING_FACE_NAMES.get(module.rpartition(".")[2], "") for module in modules} - {""}
    if any(_EXPERTS.search(module) for module in modules):
        names |= {"linear_fc1_gate", "linear_fc1_up", "linear_fc2"}
    return names if canonical else {fused.get(name, name) for name in names}
