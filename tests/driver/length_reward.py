"""A user's reward function for tests: it differs between answers, so that every group has a gradient."""

from rl_actors.types import Prompt


def shorter_is_better(prompt: Prompt, text: str) -> float:
    return -len(text) / 10.0
