"""How a benchmark puts code of its own into the actors of running pools, without a line of it in the package.

A *part* is a class made once in each process, with the trainer's `MegatronWorker` or vLLM's worker as its argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rl_actors.pool import ActorPool


class Part(Protocol):
    def __init__(self, worker: Any) -> None: ...


class Ranks:
    """A part in every trainer rank."""

    def __init__(self, pool: ActorPool, part: type[Part], timeout_s: float) -> None:
        self._pool, self._part, self._timeout_s = pool, part, timeout_s

    def __len__(self) -> int:
        return len(self._pool.specs)

    async def call(self, method: str, per_rank: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Call a method of the part on every rank, each with its own arguments."""
        arguments = per_rank or [()] * len(self)
        calls = [(_call_part, self._part, method, own) for own in arguments]
        return await self._pool.acall("__ray_call__", timeout_s=self._timeout_s, per_actor=calls)


class Workers:
    """A part in every engine worker, all workers of the first engine first."""

    def __init__(self, pool: ActorPool, workers_per_engine: int, part: type[Part], timeout_s: float) -> None:
        self._pool, self._workers, self._part, self._timeout_s = pool, workers_per_engine, part, timeout_s

    def __len__(self) -> int:
        return len(self._pool.specs) * self._workers

    async def call(self, method: str, per_worker: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Call a method of the part on every worker, each with its own arguments."""
        arguments = per_worker or [()] * len(self)
        calls = [
            (_on_worker, self._part, method, list(arguments[first : first + self._workers]))
            for first in range(0, len(self), self._workers)
        ]
        answers = await self._pool.acall("collective_rpc", timeout_s=self._timeout_s, per_actor=calls)
        return [answer for engine in answers for answer in engine]


def _call_part(worker: Any, part: type[Part], method: str, arguments: tuple[Any, ...]) -> Any:
    import torch

    parts = worker.__dict__.setdefault("_bench_parts", {})
    if part.__qualname__ not in parts:
        parts[part.__qualname__] = part(worker)
    with torch.no_grad():
        return getattr(parts[part.__qualname__], method)(*arguments)


def _on_worker(worker: Any, part: type[Part], method: str, per_worker: list[tuple[Any, ...]]) -> Any:
    from vllm.distributed import get_tensor_model_parallel_rank

    return _call_part(worker, part, method, per_worker[get_tensor_model_parallel_rank()])
