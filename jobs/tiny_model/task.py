"""The arithmetic task of the tiny model: reasoning-gym's chain_sum, with two habits of answering it.

A *stepwise* answer writes the running total after each term and is usually right. A *guess* writes a number near the
result at once and is usually wrong. The base model is first taught to work stepwise, then, like much text written by
people, to bother with short sums and to guess long ones. So its accuracy is low although it can do better. RL sees
only whether the final number is right, and has to find out that the steps are worth their tokens.

Invariant: a question belongs to exactly one split ("sft", "train", "eval"), by a hash of its expression, so held-out
questions are never trained on, whatever the seeds and sizes.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any, Literal

import reasoning_gym

from jobs.tiny_model.settings import TaskSettings

Split = Literal["sft", "train", "eval"]

TASK = "chain_sum"
_BUCKETS = 16
_EVAL_BUCKETS = (0,)
_TRAIN_BUCKETS = (1, 2, 3, 4)
# reasoning-gym derives entry i from `seed + i`: streams need seeds far apart not to repeat each other.
_SEED_STRIDE = 10_000_000


def entries(settings: TaskSettings, split: Split, seed: int) -> Iterator[dict[str, Any]]:
    """Endless reasoning-gym entries (question, answer, metadata) of one split; repeats are possible."""
    dataset = reasoning_gym.create_dataset(
        TASK,
        min_terms=settings.min_terms,
        max_terms=settings.max_terms,
        min_digits=1,
        max_digits=settings.digits,
        seed=seed * _SEED_STRIDE,
        size=_SEED_STRIDE,
    )
    return (entry for entry in dataset if split_of(entry["metadata"]["expression"]) == split)


def unique_rows(settings: TaskSettings, split: Split, seed: int, count: int) -> list[dict[str, Any]]:
    """`count` different entries of a split as dataset rows: id, question, answer and the entry's metadata."""
    rows: dict[str, dict[str, Any]] = {}
    for drawn, entry in enumerate(entries(settings, split, seed)):
        rows.setdefault(entry["question"], entry)
        if len(rows) == count:
            break
        if drawn > 100 * count:
            raise ValueError(f"{settings} has fewer than {count} different questions in split {split!r}")
    return [{"id": f"{split}-{number}", **entry} for number, entry in enumerate(rows.values())]


def split_of(expression: str) -> Split:
    bucket = hashlib.sha256(expression.encode()).digest()[0] % _BUCKETS
    return "eval" if bucket in _EVAL_BUCKETS else "train" if bucket in _TRAIN_BUCKETS else "sft"


def stepwise_answer(expression: str) -> str:
    """Running totals before the last one, then the result: "3 + 8 - 5 + 9" -> "11 6 <answer>15</answer>"."""
    first, *rest = expression.split()
    totals = [int(first)]
    for operator, term in zip(rest[::2], rest[1::2], strict=True):
        totals.append(totals[-1] + int(term) if operator == "+" else totals[-1] - int(term))
    return "".join(f"{total} " for total in totals[1:-1]) + f"<answer>{totals[-1]}</answer>"


def habitual_answer(entry: dict[str, Any], settings: TaskSettings, rng: random.Random) -> str:
    """The answer that the base model's habits give: stepwise or a guess, by chance."""
    short = entry["metadata"]["num_terms"] == settings.min_terms
    if rng.random() < (settings.stepwise_short if short else settings.stepwise_long):
        return stepwise_answer(entry["metadata"]["expression"])
    error = rng.randint(-settings.guess_error, settings.guess_error)
    return f"<answer>{int(entry['answer']) + error}</answer>"
