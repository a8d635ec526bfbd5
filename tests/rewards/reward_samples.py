"""Reward functions that do what users' functions do, good and bad."""

import asyncio
import os
import sys
import time

import numpy as np

RUNNING = 0


def length(prompt, text, scale=1.0):
    print("a function may print")
    return len(text) * scale


async def waiting(prompt, text):
    """Only all answers together, not one after the other, let this return 1."""
    global RUNNING
    RUNNING += 1
    await asyncio.sleep(0.3)
    return float(len(prompt.metadata["texts"]) == RUNNING)


def raises(prompt, text):
    if text == "bad":
        raise KeyError("no such field")
    return 1.0


class UnreadableError(Exception):
    def __str__(self):
        raise TypeError("no words")


def raises_unreadable(prompt, text):
    raise UnreadableError


def raises_lines(prompt, text):
    raise ValueError("first\n  second\n")


def hangs(prompt, text):
    if text == "hang":
        time.sleep(600)
    return 1.0


def dies(prompt, text):
    if text == "die":
        os._exit(7)
    return 1.0


def leaves(prompt, text):
    sys.exit("enough")


def returns(prompt, text):
    return {
        "none": None,
        "nan": float("nan"),
        "infinite": float("inf"),
        "text": "1.0",
        "true": True,
        "numpy": np.float32(0.5),
        "array": np.array(0.5),
        "vector": np.ones(2),
        "above float32": 1e39,
        "huge": 10**400,
    }[text]


def wants_more(prompt, text, tolerance):
    return tolerance


NOT_A_FUNCTION = 1
