"""Small JSON files, read as they are: a person, a crash or another program may have changed them."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError


def json_object(text: str | bytes) -> dict[str, Any]:
    """The object in `text`, with its values as they come.

    Raises:
        ValueError: it is no JSON, nested too deeply to be read, or something else than an object.
    """
    try:
        tree = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(tree, dict):
        raise ValueError(f"it holds a {type(tree).__name__}, not an object")
    return tree


def reason(error: Exception) -> str:
    """One line of what is wrong, for a sentence about the file; of several faults the first."""
    if isinstance(error, ValidationError):
        fault = error.errors()[0]
        return ": ".join(filter(None, (".".join(map(str, fault["loc"])), fault["msg"])))[:200]
    if isinstance(error, KeyError):
        return f"it has no {error}"
    return " ".join(str(error).split())[:200]
