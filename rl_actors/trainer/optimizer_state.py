"""The optimizer's state parameter by parameter, the same view of Megatron's plain and its distributed optimizer.

Megatron chains one optimizer for dense parameters with one for experts. A plain one holds a whole fp32 master for each
parameter (the parameter itself, if it is fp32), alike on all data-parallel ranks. The distributed one gives each
data-parallel rank one run of the flattened parameter. `Holding` is either: the run `start:stop` that this rank holds.

Written against Megatron-Core 0.19.2: `model_param_group_index_map` and `_get_model_param_range_map` of
`DistributedOptimizer`, `main_param` of the plain ones. `use_precision_aware_optimizer` keeps masters elsewhere and is
not used here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER
from torch import nn

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Holding:
    """What this rank's optimizer holds of one parameter.

    Attributes:
        main: fp32 master values of the run, flat; writing to it changes what the next step starts from.
        start: first element of the run in the flattened parameter.
        state: the inner optimizer's state of it (`exp_avg`, `exp_avg_sq`, on torch's Adam also `step`).
        sharded: by the distributed optimizer, so that no other data-parallel rank holds this run.
    """

    main: torch.Tensor
    start: int
    state: dict[str, Any]
    sharded: bool

    @property
    def stop(self) -> int:
        return self.start + self.main.numel()


def holdings(optimizer: Any) -> dict[nn.Parameter, Holding]:
    """What a Megatron optimizer (chained or single) holds on this rank, by model parameter."""
    return {parameter: holding for inner in _inner(optimizer) for parameter, holding in _of(inner)}


def reset(optimizer: Any, step: int) -> None:
    """Give every parameter zero moments at `step`; at step 0 the state of an optimizer that has not stepped."""
    for inner in _inner(optimizer):
        inner.optimizer.state.clear()
        for group in inner.optimizer.param_groups:
            group.pop("step", None)
            if not step:
                continue
            if not USING_PYTORCH_OPTIMIZER:  # Transformer Engine's FusedAdam counts by group
                group["step"] = step
            for main in group["params"]:
                state = inner.optimizer.state[main]
                for moment in MOMENTS:
                    state[moment] = torch.zeros_like(main, dtype=torch.float32)
                if USING_PYTORCH_OPTIMIZER:
                    state["step"] = torch.tensor(float(step))


def _inner(optimizer: Any) -> Iterator[Any]:
    """The optimizers of a chain that have parameters on this rank."""
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not inner.is_stub_optimizer:
            yield inner


def _of(inner: Any) -> Iterator[tuple[nn.Parameter, Holding]]:
    groups, state = inner.optimizer.param_groups, inner.optimizer.state
    if hasattr(inner, "model_param_group_index_map"):
        for parameter, (group, index) in inner.model_param_group_index_map.items():
            main = groups[group]["params"][index]
            start = inner._get_model_param_range_map(parameter)["param"].start
            yield parameter, Holding(main.detach().view(-1), start, state.get(main, {}), sharded=True)
        return
    half = getattr(inner, "float16_groups", [])
    masters = getattr(inner, "fp32_from_float16_groups", [])
    owner = {id(m): p for ps, ms in zip(half, masters, strict=True) for p, m in zip(ps, ms, strict=True)}
    for group in groups:
        for main in group["params"]:
            parameter = owner.get(id(main), main)
            yield parameter, Holding(main.detach().view(-1), 0, state.get(main, {}), sharded=False)
