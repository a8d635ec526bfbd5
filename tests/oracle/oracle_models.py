"""What the oracle measures: models that every layout of four ranks can cut, and kinds of adapters on them."""

from __future__ import annotations

from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "dense": {"arch": "dense"},
    "dense-tied": {"arch": "dense", "tied": True},
    "dense-97-tokens": {"arch": "dense", "vocab": 97},  # the vocabulary is padded where TP cuts it
    "moe": {"arch": "moe"},
    "moe-tied": {"arch": "moe", "tied": True},
}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "canonical": {"lora": {"variant": "canonical_lora"}},
    "dora": {"lora": {"variant": "dora"}},
    # Experts have half the rank, and B steps four times as far as A.
    "rslora-plus": {
        "lora": {"scaling": "rslora", "normalize_moe_lora": True},
        "optimizer": {"lora_plus_ratio": 4.0},
    },
}
