"""Everything the tiny model depends on. Imports nothing heavy, so that a finished model is found at once."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Arch = Literal["moe", "dense"]

SETTINGS_FILE = "tiny_model.json"
"""Written last into the model's folder: the fingerprint of its settings, its report, the settings themselves."""


@dataclass(frozen=True)
class TaskSettings:
    """Size of the problems, and the habits that the base model ends up with."""

    min_terms: int = 3
    max_terms: int = 5
    digits: int = 1
    stepwise_short: float = 0.9
    """Share of stepwise answers to sums of `min_terms` terms."""
    stepwise_long: float = 0.15
    """Share of stepwise answers to longer sums."""
    guess_error: int = 9
    """A guess is off by up to this much either way, uniformly."""


@dataclass(frozen=True)
class TrainingSettings:
    """How long and how fast the base model is trained."""

    steps: int = 750
    batch: int = 64
    lr: float = 8e-3
    warmup: int = 20
    stepwise_part: float = 0.75
    """Part of the steps in which every answer is stepwise; the habits come in the rest."""
    threads: int = 2


@dataclass(frozen=True)
class TinyModelSettings:
    """Another value anywhere is another model."""

    arch: Arch = "moe"
    seed: int = 0
    hidden: int = 128
    layers: int = 4
    train_prompts: int = 2048
    eval_prompts: int = 256
    task: TaskSettings = field(default_factory=TaskSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    recipe: int = 4
    """Raised when the code changes so that the same settings give another model."""

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> TinyModelSettings:
        tree: dict[str, Any] = json.loads(text)
        tree["task"], tree["training"] = TaskSettings(**tree["task"]), TrainingSettings(**tree["training"])
        return cls(**tree)
