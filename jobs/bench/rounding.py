"""How much of a small LoRA update survives when W + dW is stored in bfloat16, rounded to nearest or stochastically.

A bfloat16 number has 8 significant bits, so rounding to nearest loses a change below about 1/512 of a weight, always in
favour of the old weight. Stochastic rounding takes one of the two neighbours, the nearer one more often: right on
average, but with noise that is larger than the change itself while changes are small.

For each size of update the table has

    error      |cast(W + dW) - W - dW| / |dW|          0 is exact, 1 is as if nothing had been sent
    survives   <cast(W + dW) - W, dW> / |dW|^2         the part of the update that arrives, in its own direction
    kl         mean over tokens of KL(exact || rounded), in nats, of the model computed in float32 with those weights
    kl of dW   the same between the exact update and no update at all: what there is to lose

`dW = (alpha / rank) B A` with A as LoRA starts it and every element of B of the given size, as after size / lr steps of
Adam, whose steps have the size of the learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

SIZES = (1e-5, 1e-4, 1e-3, 1e-2)
SEQUENCES, LENGTH = 16, 48
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj")


@dataclass(frozen=True)
class RoundingRow:
    """One size of update under one rounding."""

    b_size: float
    rounding: str
    error: float
    survives: float
    kl: float
    kl_of_update: float

    def as_dict(self) -> dict[str, float | str]:
        return asdict(self)


def nearest(values: torch.Tensor) -> torch.Tensor:
    """float32 -> the nearest bfloat16, as float32."""
    return values.bfloat16().float()


def stochastic(values: torch.Tensor) -> torch.Tensor:
    """float32 -> one of the two bfloat16 neighbours, so that the mean is the value; as float32.

    The 16 bits that bfloat16 drops are added to 16 random ones; a carry rounds away from zero.
    """
    noise = torch.randint(0, 2**16, values.shape, dtype=torch.int32, device=values.device)
    return ((values.contiguous().view(torch.int32) + noise) & -(2**16)).view(torch.float32)


ROUNDINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"nearest": nearest, "stochastic": stochastic}


@torch.no_grad()
def rounding_rows(folder: Path, rank: int, scale: float, seed: int, device: str = "cpu") -> list[RoundingRow]:
    """The table for a Hugging Face model folder, whose weights are first cast to bfloat16."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float().to(device).eval()
    tokens = _sampled(model)
    base = {name: weight.clone() for name, weight in _adapted(model)}
    plain = _logprobs(model, tokens)
    rows = []
    for size in SIZES:
        updates = {name: _update(weight, rank, scale, size) for name, weight in base.items()}
        exact = _with(model, base, updates, lambda values: values, tokens)
        for name, rounding in ROUNDINGS.items():
            rounded = _with(model, base, updates, rounding, tokens)
            error, survives = _realised(base, updates, rounding)
            rows.append(RoundingRow(size, name, error, survives, _kl(exact, rounded), _kl(exact, plain)))
    return rows


def _adapted(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights of the layers that LoRA adapts; experts are stacked [expert, out, in]."""
    for name, parameter in model.named_parameters():
        if name.removesuffix(".weight").rpartition(".")[2] in ADAPTED:
            yield name, parameter


def _update(weight: torch.Tensor, rank: int, scale: float, size: float) -> torch.Tensor:
    *experts, out, width = weight.shape
    a = torch.randn(*experts, rank, width, device=weight.device) * (2.0 / (rank + width)) ** 0.5
    b = torch.randn(*experts, out, rank, device=weight.device) * size
    return scale * b @ a


def _with(
    model: Any,
    base: dict[str, torch.Tensor],
    updates: dict[str, torch.Tensor],
    rounding: Callable[[torch.Tensor], torch.Tensor],
    tokens: torch.Tensor,
) -> torch.Tensor:
    weights = dict(_adapted(model))
    for name, weight in base.items():
        weights[name].copy_(rounding(weight + updates[name]))
    logprobs = _logprobs(model, tokens)
    for name, weight in base.items():
        weights[name].copy_(weight)
    return logprobs


def _sampled(model: Any) -> torch.Tensor:
    """int64 [SEQUENCES, LENGTH]: the model's own text, so that the KL is over what a rollout would visit."""
    start = torch.randint(model.config.vocab_size, (SEQUENCES, 4), device=model.device)
    ids: torch.Tensor = model.generate(
        start, attention_mask=torch.ones_like(start), max_new_tokens=LENGTH - 4, do_sample=True, eos_token_id=-1,
        pad_token_id=0,
    )  # fmt: skip
    return ids


def _logprobs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(model(tokens).logits.double(), dim=-1)


def _kl(exact: torch.Tensor, other: torch.Tensor) -> float:
    return float((exact.exp() * (exact - other)).sum(-1).mean())


def _realised(
    base: dict[str, torch.Tensor],
    updates: dict[str, torch.Tensor],
    rounding: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[float, float]:
    """(error, survives), over all weights together."""
    lost = arrived = whole = 0.0
    for name, weight in base.items():
        change = (rounding(weight + updates[name]) - weight).double()
        wanted = updates[name].double()
        lost += float((change - wanted).square().sum())
        arrived += float((change * wanted).sum())
        whole += float(wanted.square().sum())
    return (lost / whole) ** 0.5, arrived / whole
