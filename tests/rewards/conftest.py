"""Makes `reward_samples` importable, for the tests and for the processes they start."""

import sys
from pathlib import Path

import numpy as np
import pytest

from rl_actors.types import Prompt

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.append(HERE)


@pytest.fixture
def prompt():
    def make(answer="1", **metadata):
        return Prompt("row-7", np.zeros(1, np.int32), "a question", answer, metadata)

    return make
