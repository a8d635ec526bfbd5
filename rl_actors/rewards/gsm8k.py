"""GSM8K: 1 if the answer's final number equals the reference, else 0.

The final number is, in this order: what follows the last `####`, the last `\\boxed{...}`, the last number of the
text. The reference is a GSM8K solution ("... #### 18") or the number alone. Numbers are compared exactly.
Dataset: Cobbe et al., "Training Verifiers to Solve Math Word Problems", 2021.
"""

from __future__ import annotations

import re
from decimal import Decimal

from rl_actors.rewards.boxed import last_boxed
from rl_actors.types import Prompt

# A minus is a sign only where nothing stands before it that it could be taken from, as in "5-3".
# Commas belong to a number only where they part thousands.
_NUMBER = re.compile(
    r"(?P<minus>(?<![\w)\]}%.])[-\u2212])?"
    r"(?:[$€£]\s?(?P<minus_behind_currency>[-\u2212])?)?"
    r"(?P<digits>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
)


def reward(prompt: Prompt, text: str, strict: bool = False) -> float:
    """Score one answer.

    Args:
        strict: only a number behind `####` or in `\\boxed{}` counts.

    Raises:
        ValueError: the reference answer holds no number.
    """
    expected = reference_number(prompt.answer)
    if expected is None:
        raise ValueError(f"the reference answer {str(prompt.answer)[-80:]!r} holds no number: is this GSM8K data?")
    return float(final_number(text, strict) == expected)


def reference_number(answer: object) -> Decimal | None:
    """The number of a GSM8K solution, or of an answer that is a number itself."""
    return final_number(str(answer))


def final_number(text: str, strict: bool = False) -> Decimal | None:
    """The number a text ends with; None if there is none."""
    _, marker, behind = text.rpartition("####")
    if marker:
        numbers = _numbers(behind.strip().split("\n", 1)[0])
        return numbers[0] if numbers else None
    if (boxed := last_boxed(text)) is not None:
        numbers = _numbers(boxed)
        return numbers[-1] if numbers else None
    numbers = [] if strict else _numbers(text)
    return numbers[-1] if numbers else None


def _numbers(text: str) -> list[Decimal]:
    # LaTeX writes "\$1{,}000" and "50\%".
    plain = text.replace("{,}", ",").replace("\\", "")
    return [_value(match) for match in _NUMBER.finditer(plain)]


def _value(match: re.Match[str]) -> Decimal:
    digits = Decimal(match["digits"].replace(",", ""))
    return -digits if match["minus"] or match["minus_behind_currency"] else digits
