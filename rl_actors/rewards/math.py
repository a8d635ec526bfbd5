r"""Mathematics: 1 if the answer's final expression equals the reference, else 0.

The final expression is the last `\boxed{...}`, or what follows the last "answer is", or the last line. Two
expressions are equal if their normalised LaTeX is, or if they have the same value wherever they are evaluated (see
`rl_actors.rewards.expressions`). Lists, tuples, sets and intervals are compared part by part.
"""

from __future__ import annotations

import re

from rl_actors.rewards.boxed import last_boxed
from rl_actors.rewards.expressions import normalize, same_value
from rl_actors.types import Prompt

_ANSWER_IS = re.compile(r"answer\s*(?:is|:|=)\s*:?", re.IGNORECASE)
_OPENING, _CLOSING = "([{", ")]}"


def reward(prompt: Prompt, text: str, boxed_only: bool = False) -> float:
    r"""Score one answer.

    Args:
        boxed_only: an answer outside of `\boxed{}` does not count.

    Raises:
        ValueError: the row has no reference answer.
    """
    if prompt.answer is None or not str(prompt.answer).strip():
        raise ValueError("the row has no reference answer")
    given = final_expression(text, boxed_only)
    reference = str(prompt.answer)
    expected = last_boxed(reference) or reference
    return float(given is not None and equivalent(given, expected))


def final_expression(text: str, boxed_only: bool = False) -> str | None:
    """The expression a text ends with; None if there is none."""
    if (boxed := last_boxed(text)) is not None:
        return boxed
    if boxed_only or not text.strip():
        return None
    last = _ANSWER_IS.split(text)[-1] if _ANSWER_IS.search(text) else text
    lines = [line for line in last.strip().splitlines() if line.strip()]
    return lines[0 if last is not text else -1].strip().rstrip(".") if lines else None


def equivalent(given: str, expected: str) -> bool:
    """Whether two LaTeX expressions mean the same."""
    given, expected = normalize(given), normalize(expected)
    if given == expected:
        return True
    given, expected = _right_side(given), _right_side(expected)
    brackets, parts = _parts(expected)
    given_brackets, given_parts = _parts(given)
    if brackets != given_brackets or len(parts) != len(given_parts):
        return False
    if len(parts) == 1 and not brackets:
        return given == expected or same_value(given, expected)
    if brackets in ("{}", ""):
        return _same_in_any_order(given_parts, parts)
    return all(equivalent(one, other) for one, other in zip(given_parts, parts, strict=True))


def _right_side(text: str) -> str:
    """`x = 5` answers the question for x with 5."""
    name, equals, value = text.partition("=")
    return value if equals and "=" not in value and re.fullmatch(r"\\?[A-Za-z]\w*", name) else text


def _parts(text: str) -> tuple[str, list[str]]:
    """The brackets around a list, if there are any, and its parts. Brackets count only around a comma."""
    brackets, inside = "", text
    if len(text) > 1 and text[0] in _OPENING and text[-1] in _CLOSING and _closes_at_end(text):
        brackets, inside = text[0] + text[-1], text[1:-1]
    parts = _split_at_commas(inside)
    if len(parts) == 1 and brackets != "{}":
        return "", [text]
    return brackets, parts


def _closes_at_end(text: str) -> bool:
    depth = 0
    for position, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if depth == 0:
            return position == len(text) - 1
    return False


def _split_at_commas(text: str) -> list[str]:
    parts, depth = [""], 0
    for character in text:
        depth += (character in _OPENING) - (character in _CLOSING)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _same_in_any_order(given: list[str], expected: list[str]) -> bool:
    left = list(given)
    for part in expected:
        match = next((one for one in left if equivalent(one, part)), None)
        if match is None:
            return False
        left.remove(match)
    return True
