"""The last `\\boxed{...}` of a LaTeX text."""

from __future__ import annotations

_OPENINGS = ("\\boxed", "\\fbox")


def last_boxed(text: str) -> str | None:
    """What stands in the last complete `\\boxed{...}`, nested braces included; None if there is none."""
    starts = sorted(
        (position + len(opening) for opening in _OPENINGS for position in _occurrences(text, opening)), reverse=True
    )
    for start in starts:
        if (content := _braced(text, start)) is not None:
            return content
    return None


def _occurrences(text: str, part: str) -> list[int]:
    found, position = [], text.find(part)
    while position >= 0:
        found.append(position)
        position = text.find(part, position + 1)
    return found


def _braced(text: str, start: int) -> str | None:
    while start < len(text) and text[start] == " ":
        start += 1
    if start >= len(text) or text[start] != "{":
        return None
    depth = 0
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + 1 : position]
    return None
