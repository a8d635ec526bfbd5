"""World size 1 as the truth about every layout: how far is each quantity of each rank from it?

    oracle.errors(config, {"tp": 2})["gradients"]  ->  Worst(error=3e-7, where="rank 1, layers.0...linear_fc1.A")

`config` may have any model and any kind of adapter. Each (config, layout, fault) is measured once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from oracle_tasks import Numbers, measure
from rank_process import RankProcesses, with_layout

from rl_actors.config import RunConfig
from rl_actors.types import TrainBatch

TOLERANCE = 1e-5
QUANTITIES = (
    "adapters",
    "logprobs",
    "loss",
    "gradients",
    "new adapters",
    "merged weights",
    "merged logprobs",
)
Layout = dict[str, int]


@dataclass(frozen=True, order=True)
class Worst:
    """The greatest relative error of a quantity, and on which rank and item."""

    error: float
    where: str


class LayoutOracle:
    """Measures a batch in layouts of up to as many ranks as there are processes."""

    def __init__(self, ranks: RankProcesses, batch: TrainBatch) -> None:
        self.ranks = ranks
        self.batch = batch
        self._numbers: dict[tuple[str, str, str], list[Numbers]] = {}

    def numbers(self, config: RunConfig, layout: Layout, broken: str = "") -> list[Numbers]:
        """What each rank of the layout measures, in rank order."""
        key = (config.model_dump_json(), layout_name(layout), broken)
        if key not in self._numbers:
            self._numbers[key] = self.ranks.run(measure, with_layout(config, **layout), self.batch, broken)
        return self._numbers[key]

    def errors(self, config: RunConfig, layout: Layout, broken: str = "") -> dict[str, Worst]:
        """The worst error of each quantity against world size 1, which is never broken."""
        return compare(self.numbers(config, layout, broken), self.numbers(config, {})[0])


def layout_name(layout: Layout) -> str:
    """Such as `tp2-pp2`; `dp` are rank groups; a single rank is `one`."""
    axes = {axis.replace("replicas", "dp"): size for axis, size in layout.items() if size > 1}
    return "-".join(f"{axis}{size}" for axis, size in axes.items()) or "one"


def compare(ranks: list[Numbers], truth: Numbers) -> dict[str, Worst]:
    """The worst relative error of each quantity over ranks and items; infinite where an item lacks or is unknown."""
    errors = {}
    for quantity, expected in truth.items():
        found = set().union(*(numbers[quantity] for numbers in ranks))
        worst = [Worst(np.inf, f"no rank has {item}") for item in expected.keys() - found]
        for rank, numbers in enumerate(ranks):
            for item, value in numbers[quantity].items():
                error = relative_error(value, expected[item]) if item in expected else np.inf
                worst.append(Worst(error, f"rank {rank}, {item}"))
        errors[quantity] = max(worst)
    return errors


def relative_error(found: Any, truth: Any) -> float:
    """Greatest difference over greatest value: max |found - truth| / max |truth|."""
    found, truth = np.asarray(found, dtype=np.float64), np.asarray(truth, dtype=np.float64)
    if found.shape != truth.shape or not np.isfinite(found).all():
        return float("inf")
    difference = float(np.abs(found - truth).max())
    return difference / float(np.abs(truth).max()) if difference else 0.0


def table(rows: dict[str, dict[str, Worst]]) -> str:
    """Worst relative errors, one row for each layout."""
    width = max(len(name) for name in rows)
    quantities = next(iter(rows.values())).keys()
    lines = [" " * width + "".join(f"  {quantity:>15}" for quantity in quantities)]
    for name, errors in rows.items():
        lines.append(f"{name:{width}}" + "".join(f"  {errors[quantity].error:15.1e}" for quantity in quantities))
    return "\n".join(lines)
