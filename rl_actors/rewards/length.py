"""A length penalty: the shorter the answer, the better; an answer of `characters` characters scores -1.

It needs no right answer, so it also works on a model that knows nothing: rehearsals and measurements use it.
"""

from __future__ import annotations

from rl_actors.types import Prompt


def reward(prompt: Prompt, text: str, characters: float = 1000.0) -> float:
    """Score one answer: minus its length in units of `characters`."""
    return -len(text) / characters
