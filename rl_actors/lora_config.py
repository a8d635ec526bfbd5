"""The `lora` section of a run's configuration, and the names that Megatron and Hugging Face have for the same linears.

What needs the model's sizes is checked in `rl_actors.targets`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, ValidationInfo, field_validator, model_validator

from rl_actors.config_section import Section, Text

FUSED_PARTS = {
    "linear_qkv": ("linear_q", "linear_k", "linear_v"),
    "linear_fc1": ("linear_fc1_gate", "linear_fc1_up"),
}
"""Linears that Megatron fuses, and what `canonical_lora` calls their parts."""

HUGGING_FACE_NAMES = {
    "q_proj": "linear_q",
    "k_proj": "linear_k",
    "v_proj": "linear_v",
    "o_proj": "linear_proj",
    "gate_proj": "linear_fc1_gate",
    "up_proj": "linear_fc1_up",
    "down_proj": "linear_fc2",
}


class LoraConfig(Section):
    variant: Literal["lora", "canonical_lora", "dora"] = "lora"
    """`lora`: one adapter for each of Megatron's linears. `canonical_lora`: query, key, value, gate and up have one
    each, as in PEFT. `dora`: `lora` and a trained length of every row of the weight (arXiv 2402.09353)."""
    rank: PositiveInt = 32
    alpha: PositiveInt = 32
    scaling: Literal["standard", "rslora"] = "standard"
    """The adapter's output is scaled with alpha / rank, or with alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732)."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    targets: Annotated[tuple[Text, ...], Field(min_length=1, validate_default=True)] = (
        "linear_qkv",
        "linear_proj",
        "linear_fc1",
        "linear_fc2",
    )
    """Megatron-Core module names; wildcards such as `*.layers.0.*.linear_qkv` work. With `canonical_lora` the default
    is linear_q, linear_k, linear_v, linear_proj, linear_fc1_gate, linear_fc1_up and linear_fc2."""
    exclude: tuple[str, ...] = ()
    """Module names or wildcards among the targets to leave unadapted."""
    a_init: Literal["xavier", "normal", "kaiming"] = "xavier"
    b_init: Literal["zero"] = "zero"
    """B starts at zero, so that the adapted model equals the base before training."""
    init_from: Text | None = None
    """Folder of a PEFT adapter to start from: a checkpoint's `adapter/`, or one that `peft` made. Where query, key and
    value (gate and up) have an A of their own, use `canonical_lora`, or the sum of their ranks here."""
    share_expert_adapters: bool = False
    """One adapter for all experts of a rank. It makes the model depend on EP; leave it off."""
    normalize_moe_lora: bool = False
    """Divide the rank of expert adapters by the router's top-k."""

    @model_validator(mode="before")
    @classmethod
    def _targets_of_the_variant(cls, tree: Any) -> Any:
        if isinstance(tree, dict) and tree.get("variant") == "canonical_lora" and "targets" not in tree:
            default = cls.model_fields["targets"].default
            return {**tree, "targets": tuple(part for name in default for part in FUSED_PARTS.get(name, (name,)))}
        return tree

    @field_validator("targets", "exclude")
    @classmethod
    def _names_of_the_variant(cls, patterns: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        canonical = info.data.get("variant") == "canonical_lora"
        fused_of = {part: fused for fused, parts in FUSED_PARTS.items() for part in parts}
        for pattern in patterns:
            if not re.fullmatch(r"[\w.*]+", pattern):
                raise ValueError(
                    f"{pattern!r} is no module name: write letters, digits, _ and dots, with * for any text"
                )
            name = pattern.rpartition(".")[2]
            ours = HUGGING_FACE_NAMES.get(name, name)
            if not canonical and ours in fused_of:
                raise ValueError(
                    f"{name} is a part of Megatron's {fused_of[ours]}: use {fused_of[ours]}, or {ours} with "
                    "lora.variant=canonical_lora"
                )
            if canonical and ours in FUSED_PARTS:
                raise ValueError(
                    f"canonical_lora adapts the parts of {name}: use {', '.join(FUSED_PARTS[ours])}, or "
                    "lora.variant=lora"
                )
            if ours != name:
                raise ValueError(f"{name} is Hugging Face's name: Megatron's is {ours}")
        return patterns

    @field_validator("dropout", "share_expert_adapters")
    @classmethod
    def _setting_fits_the_variant(cls, value: Any, info: ValidationInfo) -> Any:
        variant = info.data.get("variant")
        if value and variant == "dora":
            raise ValueError("dora has none: leave it off, or use lora.variant=lora")
        if value and variant == "canonical_lora" and info.field_name == "share_expert_adapters":
            raise ValueError("canonical_lora gives every expert its own adapters: leave it off")
        return value
