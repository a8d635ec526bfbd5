"""reasoning-gym: the score that the row's own task gives, between 0 and 1.

The task is `prompt.metadata["source_dataset"]`, as every reasoning-gym entry carries it. The final answer is what
stands in the last `<answer>...</answer>`; an answer without the tags is taken whole.
"""

from __future__ import annotations

import difflib
import functools
import warnings
from collections.abc import Callable
from typing import Any

from rl_actors.types import Prompt

with warnings.catch_warnings():  # cellpylib, which it imports, compares text with `is`
    warnings.simplefilter("ignore", SyntaxWarning)
    import reasoning_gym
    from reasoning_gym.factory import DATASETS, get_score_answer_fn
    from reasoning_gym.utils import extract_answer


def reward(prompt: Prompt, text: str, task: str | None = None, binary: bool = False) -> float:
    """Score one answer.

    Args:
        task: name of the reasoning-gym task; None reads it from the row.
        binary: only a full score counts, as 1; many tasks give part of a point to answers that are near.

    Raises:
        ValueError: the row does not say its task, or reasoning-gym has no such task.
    """
    name = task or prompt.metadata.get("source_dataset")
    if not name:
        raise ValueError(
            f"the row has no 'source_dataset' in its metadata (it has {sorted(prompt.metadata)}): "
            "write the data with jobs.data reasoning_gym, or set reward.kwargs.task"
        )
    score = _scorer(str(name))(final_answer(text), _entry(prompt))
    return float(score >= 1.0) if binary else float(score)


def final_answer(text: str) -> str:
    """What stands in the last pair of answer tags, or the whole text without them."""
    tagged: str | None = extract_answer(text)
    return text.strip() if tagged is None else tagged


@functools.cache
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=1)
        raise ValueError(
            f"reasoning-gym {reasoning_gym.__version__} has no task {task!r}"
            + (f": did you mean {near[0]!r}?" if near else "")
        )
    scorer: Callable[[str, dict[str, Any]], float] = get_score_answer_fn(task)
    return scorer


def _entry(prompt: Prompt) -> dict[str, Any]:
    """The entry as reasoning-gym made it."""
    return {"question": prompt.text, "answer": prompt.answer, "metadata": prompt.metadata}
