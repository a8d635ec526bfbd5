"""The thread that owns vLLM: it steps while there is work and runs commands between two steps.

vLLM is not thread-safe and CUDA's current device belongs to a thread, so everything that touches the engine goes
through here. A command waits for at most one step. After a step failed none is started again, but commands are still
answered, so nobody waits for ever.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class StepThread:
    """Calls `step()` again and again while `has_work()`, and `on_failure(error)` once when a step raises."""

    def __init__(
        self, name: str, has_work: Callable[[], bool], step: Callable[[], None], on_failure: Callable[[Exception], None]
    ) -> None:
        self._has_work = has_work
        self._step = step
        self._on_failure = on_failure
        self._failed = False
        self._step_started: float | None = None
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the commands given so far."""
        self._commands.put(None)

    async def call(self, command: Callable[[], Result]) -> Result:
        """Run `command` on the thread, between two steps. Its result or exception is the caller's."""
        future: Future[Result] = Future()
        self._commands.put((command, future))
        return await asyncio.wrap_future(future)

    @property
    def step_s(self) -> float:
        """Seconds since the present step began; 0 between steps."""
        started = self._step_started
        return 0.0 if started is None else time.perf_counter() - started

    def _run(self) -> None:
        while self._run_commands():
            if self._should_step():
                self._step_started = time.perf_counter()
                try:
                    self._step()
                except Exception as error:  # noqa: BLE001 - whatever it is, the callers that wait are told
                    self._failed = True
                    self._on_failure(error)
                self._step_started = None

    def _should_step(self) -> bool:
        return not self._failed and self._has_work()

    def _run_commands(self) -> bool:
        """Run the commands that wait; without work to step for, wait for one. False ends the thread."""
        wait = not self._should_step()
        while True:
            try:
                item = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if item is None:
                return False
            wait = False
            command, future = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(command())
                except Exception as error:  # noqa: BLE001 - handed to the caller of the command
                    future.set_exception(error)
