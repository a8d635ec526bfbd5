"""The process in which reward functions run: `python -m rl_actors.rewards.child FD`.

It is apart from the actor so that a function that never returns, or that crashes the interpreter, can be ended.
It reads (function name, kwargs), then one (prompt, texts) after the other from the inherited connection, and answers
each with ("scores", list of floats) or ("error", message). It ends with the connection, or with its parent if a
function still runs then.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from rl_actors.rewards.registry import RewardFunction, one_line, resolve
from rl_actors.types import Prompt

_PARENT_CHECK_S = 1.0


def score_texts(
    function: RewardFunction, prompt: Prompt, texts: Sequence[str], kwargs: Mapping[str, Any]
) -> list[float]:
    """Score each text, in order. Async functions score all texts at the same time.

    Raises:
        ValueError: the function returned something that is not a finite number.
        Exception: what the function raised.
    """
    results = [function(prompt, text, **kwargs) for text in texts]
    if any(inspect.isawaitable(result) for result in results):
        results = asyncio.run(_gather(results))
    return [_as_score(result) for result in results]


async def _gather(results: list[Any]) -> list[Any]:
    return list(await asyncio.gather(*results))


def _as_score(value: Any) -> float:
    """A finite float, from any number type; also from one-element numpy arrays and torch tensors."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, (numbers.Real, np.bool_)):
        raise ValueError(f"returned {value!r} of type {type(value).__name__}, not a number")
    try:
        score = float(value)
    except OverflowError:
        raise ValueError("returned a number too large for float32") from None
    if not math.isfinite(score):
        raise ValueError(f"returned {score}, not a finite number")
    if abs(score) > np.finfo(np.float32).max:
        raise ValueError(f"returned {score}, which is not finite as float32")
    return score


def _describe(error: BaseException) -> str:
    """Type, message, and the innermost line of the function's own code."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename != __file__:
            place = f" (in {code.co_name}, {code.co_filename}:{trace.tb_lineno})"
        trace = trace.tb_next
    return f"{type(error).__name__}: {one_line(error)}{place}"


def _end_with_parent() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(1)


def serve(connection: Connection) -> None:
    """Answer requests until the other side closes."""
    name, kwargs = connection.recv()
    try:
        function = resolve(name, kwargs)
    except Exception as error:  # noqa: BLE001 - told to the worker, which raises it there
        connection.send(("error", _describe(error)))
        return
    connection.send(("ready", None))
    while True:
        try:
            prompt, texts = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("scores", score_texts(function, prompt, texts, kwargs)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - told to the worker, which names the prompt
            connection.send(("error", _describe(error)))


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    serve(Connection(int(sys.argv[1])))
