"""World size 1, the truth about all layouts, against a plain trainer that shares no code with it.

It holds all logits at once, where the trainer never does, and its gradient is clipped as well.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from layout_oracle import TOLERANCE, LayoutOracle, compare, table
from oracle_models import MODELS, VARIANTS
from plain_trainer import train_plainly


@pytest.mark.parametrize(
    "model", [*MODELS, *(f"{model} {variant}" for model in ("dense", "moe") for variant in VARIANTS)]
)
def test_world_size_one_equals_a_plain_trainer(oracle: LayoutOracle, oracle_config: Any, model: str) -> None:
    config = oracle_config(model)
    (one,) = oracle.numbers(config, {})
    plain = train_plainly(config, one["adapters"], oracle.batch)
    known = {quantity: {item: one[quantity][item] for item in items} for quantity, items in plain.items()}
    errors = compare([known], plain)
    row = table({model: errors})
    print("\n" + row)
    assert max(worst.error for worst in errors.values()) <= TOLERANCE, row
    assert {name for name in one["gradients"] if name.startswith("layers.")} == one["adapters"].keys()
    assert one["gradients"]["grad_norm"] > config.trainer.optimizer.clip_grad
    norms = [value for name, value in one["gradients"].items() if name.startswith("grad_norm/")]
    assert len(norms) == (7 if "canonical" in model else 4) and min(norms) > 0
    assert one["gradients"]["grad_norm"] == pytest.approx(math.hypot(*norms))
