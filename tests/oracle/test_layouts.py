"""Layout does not change the model: every layout of up to four ranks equals world size 1, in float32.

`pytest tests/oracle -s` prints the worst relative errors. What each test would say of a trainer's fault is shown in
test_broken_invariants.py. On CPU there are no packed sequences and no context parallelism: micro-batches are padded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from layout_oracle import QUANTITIES, TOLERANCE, LayoutOracle, Worst, layout_name, table
from oracle_models import VARIANTS

from placement.layout import MegatronLayout

LAYOUTS = [
    {"tp": tp, "pp": pp, "ep": ep, "replicas": replicas}
    for tp, pp, ep, replicas in itertools.product((1, 2, 4), (1, 2), (1, 2, 4), (1, 2, 3, 4))
    if 1 < MegatronLayout(tp=tp, pp=pp, ep=ep, replicas=replicas).world_size <= 4
]
DENSE = [layout for layout in LAYOUTS if layout["ep"] == 1]
# Tied or padded, a vocabulary is another matter only where tensor parallel ranks cut it or pipeline stages share it.
TELLING: dict[str, list[dict[str, int]]] = {
    "dense-tied": [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}],
    "dense-97-tokens": [{"tp": 2, "pp": 2}, {"tp": 4}],
    "moe-tied": [{"pp": 2}, {"ep": 2}, {"tp": 2, "ep": 2}, {"pp": 2, "ep": 2}, {"tp": 2, "pp": 2, "ep": 2}],
    **{f"dense {variant}": [{"tp": 2, "pp": 2}] for variant in VARIANTS},
    **{f"moe {variant}": [{"tp": 2}, {"pp": 2}, {"ep": 2}, {"tp": 2, "pp": 2, "ep": 2}] for variant in VARIANTS},
}
CASES = [
    *[("dense", layout) for layout in DENSE],
    *[("moe", layout) for layout in LAYOUTS],
    *[(model, layout) for model, layouts in TELLING.items() for layout in layouts],
]
QUICK = ["tp2", "tp4", "pp2", "ep2", "ep4", "dp2", "tp2-pp2", "tp2-ep2", "pp2-ep2", "tp2-dp2", "tp2-pp2-ep2"]
"""What `make test` runs of the two plain models; of each other one it runs the last. `make test-all` runs all."""


def is_quick(model: str, layout: dict[str, int]) -> bool:
    return layout == TELLING[model][-1] if model in TELLING else layout_name(layout) in QUICK


every_case = pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(*case, id=f"{case[0]}-{layout_name(case[1])}", marks=[] if is_quick(*case) else pytest.mark.slow)
        for case in CASES
    ],
)


@pytest.fixture(scope="module")
def errors(oracle: LayoutOracle, oracle_config: Any) -> Iterator[Any]:
    """`errors(model, layout)`; at the end of the file all of them are printed."""
    rows: dict[str, dict[str, Worst]] = {}

    def of(model: str, layout: dict[str, int]) -> dict[str, Worst]:
        found = rows[f"{model} {layout_name(layout)}"] = oracle.errors(oracle_config(model), layout)
        return found

    yield of
    print("\nworst relative errors against world size 1\n" + table(rows))


@every_case
@pytest.mark.parametrize("quantity", QUANTITIES)
def test_layout_equals_world_size_one(errors: Any, model: str, layout: dict[str, int], quantity: str) -> None:
    found = errors(model, layout)
    assert found[quantity].error <= TOLERANCE, f"{found[quantity]}\n{table({layout_name(layout): found})}"


@every_case
def test_step_zero_is_the_base_exactly(
    oracle: LayoutOracle, oracle_config: Any, model: str, layout: dict[str, int]
) -> None:
    for numbers in oracle.numbers(oracle_config(model), layout):
        np.testing.assert_array_equal(numbers["logprobs"]["step zero"], numbers["logprobs"]["adapters off"])
