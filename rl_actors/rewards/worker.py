"""One CPU actor that scores answers, with the reward function in a process of its own.

Invariants:
- An answer's score is what the function returned. A function that raises, returns no finite number, dies or takes
  too long is a RewardError that names the function and the prompt; never a score of 0.
- A function that hangs does not hang the worker: its process is ended, and the next prompt gets a new one.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np

from rl_actors.errors import RewardError
from rl_actors.types import Prompt

START_TIMEOUT_S = 120.0
"""For importing the module of the reward function."""


class RewardWorker:
    """Scores the answers of one prompt after the other. A plain class; `RewardPool` makes Ray actors of it.

    Args:
        function: `gsm8k`, `math`, `reasoning_gym` or `module:function`.
        kwargs: passed to the function by name.
        timeout_s: bound on scoring all answers of one prompt, in seconds.

    Raises:
        RewardError: the function cannot be resolved.
    """

    def __init__(self, function: str, kwargs: Mapping[str, Any] | None = None, timeout_s: float = 60.0) -> None:
        self.function = function
        self.kwargs = dict(kwargs or {})
        self.timeout_s = timeout_s
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._start()

    def score(self, prompt: Prompt, texts: Sequence[str]) -> np.ndarray:
        """float32 [G]: the reward of each text.

        Raises:
            RewardError: see the invariants above.
        """
        with self._lock:
            if self._child is None:
                self._start()
            return np.asarray(self._ask(prompt, list(texts)), dtype=np.float32)

    def close(self) -> None:
        """End the function's process."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        # The child finds what this process can import: the job's working directory above all.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "rl_actors.rewards.child", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        try:
            self._connection.send((self.function, self.kwargs))
            kind, value = self._receive(START_TIMEOUT_S)
        except TimeoutError:
            self.close()
            raise RewardError(f"reward {self.function!r} was not imported within {START_TIMEOUT_S:g} s") from None
        except (EOFError, OSError):
            raise RewardError(f"reward {self.function!r} could not be started: {self._end()}") from None
        if kind == "error":
            self.close()
            raise RewardError(f"reward {self.function!r} could not be started: {value}")

    def _ask(self, prompt: Prompt, texts: list[str]) -> list[float]:
        assert self._connection is not None
        try:
            self._connection.send((prompt, texts))
            kind, value = self._receive(self.timeout_s)
        except TimeoutError:
            self.close()
            raise RewardError(
                f"reward {self.function!r} did not score prompt {prompt.id!r} within {self.timeout_s:g} s "
                f"({len(texts)} answers): its process was ended; raise reward.timeout_s if it needs longer"
            ) from None
        except (EOFError, OSError):
            raise RewardError(f"reward {self.function!r} on prompt {prompt.id!r}: {self._end()}") from None
        if kind == "error":
            raise RewardError(f"reward {self.function!r} on prompt {prompt.id!r}: {value}")
        return value  # type: ignore[no-any-return]

    def _receive(self, timeout_s: float) -> tuple[str, Any]:
        assert self._connection is not None
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        answer: tuple[str, Any] = self._connection.recv()
        return answer

    def _end(self) -> str:
        """What became of a process that closed its side."""
        code = None
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._child.wait(timeout=5.0)
        self.close()
        return "its process closed the connection" if code is None else f"its process died with exit code {code}"
