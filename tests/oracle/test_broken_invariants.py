"""The oracle notices what it is there for: each fault, put in on purpose, makes its tests of test_layouts.py fail.

| fault                            | `test_layout_equals_world_size_one[...]` that fails                             |
|----------------------------------|---------------------------------------------------------------------------------|
| gradients are not reduced        | gradients, and all after the step, wherever a layer has data parallel ranks     |
| loss is divided by micro-batches | gradients, and all after the step, in every layout                              |
| adapters are seeded by rank      | every quantity, adapters first, in every layout                         |
| merge has another scale          | merged weights and merged logprobs, in every layout                             |

"All after the step" is new adapters, merged weights and merged logprobs. What stands before the fault stays exact, so
the first quantity that fails names the place.
"""

from __future__ import annotations

from typing import Any

import pytest
from layout_oracle import QUANTITIES, TOLERANCE, LayoutOracle, compare, layout_name, table

AFTER_THE_STEP = ("new adapters", "merged weights", "merged logprobs")
CASES: list[tuple[str, str, dict[str, int], tuple[str, ...]]] = [
    ("gradients are not reduced", "dense", {"replicas": 2}, ("gradients", *AFTER_THE_STEP)),
    ("gradients are not reduced", "moe", {"tp": 2}, ("gradients", *AFTER_THE_STEP)),
    ("gradients are not reduced", "moe", {"ep": 2}, ("gradients", *AFTER_THE_STEP)),
    ("loss is divided by micro-batches", "dense", {}, ("gradients", *AFTER_THE_STEP)),
    ("loss is divided by micro-batches", "moe", {"pp": 2}, ("gradients", *AFTER_THE_STEP)),
    ("adapters are seeded by rank", "dense", {"tp": 2}, QUANTITIES),
    ("adapters are seeded by rank", "dense", {"replicas": 2}, QUANTITIES),
    ("adapters are seeded by rank", "moe", {"ep": 2}, QUANTITIES),
    ("merge has another scale", "moe", {"tp": 2, "ep": 2}, ("merged weights", "merged logprobs")),
]


@pytest.mark.parametrize(
    ("fault", "model", "layout", "wrong"),
    [pytest.param(*case, id=f"{case[0]}-{case[1]}-{layout_name(case[2])}") for case in CASES],
)
def test_the_oracle_names_what_a_fault_breaks(
    oracle: LayoutOracle, oracle_config: Any, fault: str, model: str, layout: dict[str, int], wrong: tuple[str, ...]
) -> None:
    errors = oracle.errors(oracle_config(model), layout, fault)
    row = table({fault: errors})
    print("\n" + row)
    assert {quantity for quantity, worst in errors.items() if worst.error > TOLERANCE} == set(wrong), row
    # A fault is not a matter of tolerance.
    assert errors[wrong[0]].error > 1e-2, row


@pytest.mark.parametrize(("layout", "whole"), [({"tp": 2}, "self_attention"), ({"ep": 2}, "experts")])
def test_a_missing_reduction_names_the_layers_that_lack_it(
    oracle: LayoutOracle, oracle_config: Any, layout: dict[str, int], whole: str
) -> None:
    """At TP2 the ranks share attention and split the tokens of experts; at EP2 it is the other way round."""
    config = oracle_config("moe")
    truth = oracle.numbers(config, {})[0]["gradients"]
    broken = oracle.numbers(config, layout, "gradients are not reduced")
    for numbers in broken:
        errors = {
            name: compare([{"gradients": {name: value}}], {"gradients": {name: truth[name]}})["gradients"].error
            for name, value in numbers["gradients"].items()
            if name.startswith("layers.")
        }
        assert all(error <= TOLERANCE for name, error in errors.items() if whole in name)
        assert any(error > 1e-2 for name, error in errors.items() if whole not in name)


@pytest.mark.parametrize(
    ("ranks", "where"),
    [
        ([{"layers.0.A": 1.0}], "no rank has layers.1.A"),
        ([{"layers.0.A": 1.0, "layers.1.A": 2.0}, {"layers.2.A": 0.0}], "rank 1, layers.2.A"),
        ([{"layers.0.A": 1.0, "layers.1.A": 2.0}, {"layers.1.A": float("nan")}], "rank 1, layers.1.A"),
    ],
)
def test_what_lacks_or_is_no_number_is_an_error(ranks: list[dict[str, float]], where: str) -> None:
    truth = {"gradients": {"layers.0.A": 1.0, "layers.1.A": 2.0}}
    worst = compare([{"gradients": numbers} for numbers in ranks], truth)["gradients"]
    assert worst.where == where and worst.error > TOLERANCE
