"""A few processes that stand for ranks of any layout, one after the other.

Importing Megatron costs 20-30 s, so a fork server imports it once and every rank process is forked from that. A task
is a module-level function `task(worker, ...)`; the pool runs it on the ranks of a layout, with Megatron's groups made
anew.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from placement.layout import MegatronLayout
from rl_actors.config import RunConfig

PRELOAD = "trainer_preload"
MOST_THREADS = 250
"""A rank of one layout has up to 170."""


class RankFailed(AssertionError):  # noqa: N818
    """A task raised on a rank."""


class RankProcesses:
    """Up to `size` rank processes."""

    def __init__(self, size: int, timeout_s: float = 120.0) -> None:
        self.timeout_s = timeout_s
        self._context = context = mp.get_context("forkserver")
        # The fork server of Python 3.12 does not take over sys.path, but it does take the environment.
        paths = [str(Path(__file__).parent), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        context.set_forkserver_preload([PRELOAD])
        self.pipes, self.processes = [], []
        for rank in range(size):
            pipe, process = self._fork(rank)
            self.pipes.append(pipe)
            self.processes.append(process)

    def _fork(self, rank: int) -> tuple[Any, Any]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(rank, theirs), daemon=True)
        process.start()
        return ours, process

    def _renew(self, rank: int) -> None:
        """Replace a process whose groups were not all given up: their threads wake a hundred times a second."""
        process = self.processes[rank]
        if len(list(Path(f"/proc/{process.pid}/task").iterdir())) > MOST_THREADS:
            self.pipes[rank].send(None)
            self.pipes[rank], self.processes[rank] = self._fork(rank)

    def run(self, task: Callable[..., Any], config: RunConfig, *args: Any) -> list[Any]:
        """`task(worker, *args)` on every rank of the config's layout, where `worker` was built anew. In rank order."""
        layout = MegatronLayout.from_config(config.trainer)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(layout.world_size):
            self._renew(rank)
        pipes = self.pipes[: layout.world_size]
        for pipe in pipes:
            pipe.send((task, config, layout, port, args))
        answers = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(self.timeout_s):
                raise RankFailed(f"rank {rank} did not answer {task.__name__} within {self.timeout_s} s")
            answers.append(pipe.recv())
        if failed := [text for kind, text in answers if kind == "error"]:
            raise RankFailed(failed[0])
        return [value for _, value in answers]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()


def _serve(rank: int, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    from rl_actors.trainer.worker import MegatronWorker

    torch.set_num_threads(1)
    while (order := pipe.recv()) is not None:
        task, config, layout, port, args = order
        try:
            worker = MegatronWorker(rank, config, layout, "cpu")
            worker.start("127.0.0.1", port)
            pipe.send(("value", task(worker, *args)))
        except Exception as error:  # noqa: BLE001  # told to the test
            pipe.send(("error", f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}"))
        finally:
            from megatron.core import parallel_state

            # Groups live as long as something refers to them, and each has threads that wake a hundred times a second.
            worker = None
            gc.collect()
            parallel_state.destroy_model_parallel()
            if dist.is_initialized():
                dist.destroy_process_group()


def with_layout(config: RunConfig, **changes: Any) -> RunConfig:
    """The config with other trainer settings, such as tp=2."""
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=changes)})
