"""One vLLM engine as an actor: prompts in, trajectories out, weights replaced between two steps.

Weight versions: `pause` stops at a step boundary and keeps requests in flight with their KV; then the weights may be
replaced; `resume(version)` goes on, and every token sampled from then on carries that version. An engine that failed in
a step says so to every caller and is not used again; the pool starts a new one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray

from placement.location import Location, where_am_i
from rl_actors.config import RunConfig
from rl_actors.errors import ActorDiedError, ActorLateError, RLActorsError, SyncError
from rl_actors.rollout.samples import Sample, Sampling
from rl_actors.rollout.sleep import Part
from rl_actors.rollout.step_thread import StepThread
from rl_actors.rollout.vllm_core import VllmCore
from rl_actors.rollout.vllm_settings import Device
from rl_actors.types import Prompt, Trajectory

Result = TypeVar("Result")


@dataclass(eq=False)
class _Group:
    """The samples of one prompt and the caller that waits for all of them."""

    prompt: Prompt
    samples: list[Sample]
    unfinished: int
    future: Future[list[Trajectory]] = field(default_factory=Future)

    def __post_init__(self) -> None:
        # A running future cannot be cancelled: only the step thread completes it.
        self.future.set_running_or_notify_cancel()

    def __str__(self) -> str:
        tokens = sum(len(sample.token_ids) for sample in self.samples)
        answers = f"{self.unfinished} of {len(self.samples)} answers unfinished, {tokens} tokens so far"
        return f"prompt {self.prompt.id!r} ({answers})"


class RolloutEngine:
    """A plain class; the pool makes it a named Ray actor with a "control" concurrency group.

    Methods are async and only wait: vLLM runs on a thread of its own.

    Args:
        name: what errors and the dashboard call it, such as "engine-0".
        config: the run.
        device: "cpu" or "gpu".
    """

    def __init__(self, name: str, config: RunConfig, device: Device) -> None:
        self.name = name
        self._config = config
        self._device = device
        self._sampling = Sampling.for_training(config.rollout)
        self._core: VllmCore | None = None
        self._groups: dict[str, _Group] = {}
        self._paused = False
        self._error: ActorDiedError | None = None
        self._last_figures = (0.0, 0.0)
        self._thread = StepThread(f"{name}-steps", self._has_work, self._step, self._break)

    # Life

    async def start(self, version: int = 0) -> dict[str, float]:
        """Load the model, as weights of `version`; returns the seconds it took ("start_s").

        Raises:
            ConfigError: the device cannot run the engine as configured.
        """
        started = time.perf_counter()
        self._thread.start()
        await self._thread.call(lambda: self._load(version))
        return {"start_s": time.perf_counter() - started}

    def _load(self, version: int) -> None:
        self._core = VllmCore(self.name, self._config, self._device, version)

    async def stop(self) -> None:
        """End the thread; requests in flight fail. The engine cannot be started again."""
        await self._thread.call(self._abort_all)
        self._thread.stop()

    # Sampling

    async def generate(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        seed: int,
        sampling: Sampling | None = None,
        timeout_s: float | None = None,
    ) -> list[list[Trajectory]]:
        """Sample `samples` answers for each prompt; all of them are admitted at the same step.

        Args:
            prompts: any number; giving them in separate calls works as well, vLLM batches across calls.
            samples: answers per prompt, independent requests.
            seed: together with prompt id and sample index it decides each answer's randomness.
            sampling: None takes the run's.
            timeout_s: bound on the whole call; None takes timeouts.rollout_s.

        Returns:
            For each prompt, in order, its trajectories in the order of their sample index.

        Raises:
            ConfigError: a prompt leaves no room for an answer; then none is sampled.
            ActorLateError: answers were not finished in time; they are aborted.
            ActorDiedError: the engine failed in a step.
        """
        chosen = sampling or self._sampling
        groups = await self._thread.call(lambda: self._admit(prompts, samples, seed, chosen))
        try:
            return await self._finished(groups, timeout_s or self._config.timeouts.rollout_s)
        finally:
            # Late, cancelled, or one of them failed: nobody waits for the others any more.
            if self._error is None and any(group.unfinished for group in groups):
                await asyncio.shield(self._thread.call(lambda: self._abort(groups)))

    async def generate_one(
        self,
        prompt: Prompt,
        samples: int,
        seed: int,
        sampling: Sampling | None = None,
        timeout_s: float | None = None,
    ) -> list[Trajectory]:
        """`generate` for a single prompt: call it for many prompts at once, each returns as soon as it is done."""
        return (await self.generate([prompt], samples, seed, sampling, timeout_s))[0]

    def _admit(self, prompts: Sequence[Prompt], samples: int, seed: int, sampling: Sampling) -> list[_Group]:
        core = self._loaded()
        for prompt in prompts:
            core.check_prompt(prompt)
        groups = []
        for prompt in prompts:
            admitted = core.add(prompt, samples, seed, sampling)
            group = _Group(prompt, admitted, unfinished=len(admitted))
            self._groups |= {sample.request_id: group for sample in admitted}
            groups.append(group)
        return groups

    async def _finished(self, groups: list[_Group], timeout_s: float) -> list[list[Trajectory]]:
        try:
            async with asyncio.timeout(timeout_s):
                return list(await asyncio.gather(*(asyncio.wrap_future(group.future) for group in groups)))
        except TimeoutError:
            late = "; ".join(str(group) for group in groups if group.unfinished)
            raise ActorLateError(
                f"{self.name} did not finish within {timeout_s:g} s (timeouts.rollout_s) in stage rollout, it is "
                f"{self._state()}: {late}. These answers were aborted"
            ) from None

    @ray.method(concurrency_group="control")
    async def abort_all(self) -> int:
        """Abort every request; their callers get an error. Returns how many answers were lost."""
        return await self._thread.call(self._abort_all)

    def _abort_all(self) -> int:
        groups = list(dict.fromkeys(self._groups.values()))
        self._abort(groups)
        for group in groups:
            group.future.set_exception(RLActorsError(f"{self.name}: {group} was aborted on request"))
        return sum(group.unfinished for group in groups)

    def _abort(self, groups: list[_Group]) -> None:
        for group in groups:
            self._loaded().abort(group.samples)
            for sample in group.samples:
                self._groups.pop(sample.request_id, None)

    # Weights

    @ray.method(concurrency_group="control")
    async def pause(self) -> None:
        """Stop at the next step boundary. Requests in flight and their KV are kept; new ones are accepted and wait."""
        await self._thread.call(self._pause)

    def _pause(self) -> None:
        if not self._paused:
            self._paused = True
            self._deliver(self._loaded().drain())

    @ray.method(concurrency_group="control")
    async def resume(self, version: int | None = None) -> None:
        """Go on. `version` names the weights that came in during the pause; None says that they are as before."""
        await self._thread.call(lambda: self._resume(version))

    def _resume(self, version: int | None) -> None:
        if version is not None:
            if not self._paused:
                raise SyncError(f"{self.name} got weight version {version} while sampling: pause it first")
            self._loaded().weights_changed(version)
        if self._loaded().weights_lost:
            raise SyncError(f"{self.name} gave its weights back when it slept: only a sync can resume it")
        self._loaded().wake()
        self._paused = False

    async def apply_model(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(model, *args)` on the torch model of every worker, only while paused; one result per worker."""
        return await self._thread.call(lambda: self._apply_model(function, args))

    def _apply_model(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        if not self._paused:
            raise SyncError(f"{self.name} is sampling: pause it before its weights are touched")
        return self._loaded().apply_model(function, *args)

    async def collective_rpc(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """vLLM's collective_rpc between two steps: a worker method by name, or a function of the worker."""
        return await self._thread.call(lambda: self._loaded().llm.collective_rpc(method, args=args, kwargs=kwargs))

    async def worker_locations(self) -> list[Location]:
        """Where each worker of the engine is, in the order of its TP rank."""
        return await self.collective_rpc(_location)

    async def on_engine_thread(self, function: Callable[..., Result], *args: Any) -> Result:
        """`function(llm_engine, *args)` between two steps, in this process. For the weight receiver."""
        return await self._thread.call(lambda: function(self._loaded().llm, *args))

    def model_runner(self) -> Any:
        """vLLM's model runner, when the worker is in this process (TP 1). Use it between steps only."""
        worker = getattr(self._loaded().llm.model_executor, "driver_worker", None)
        if worker is None:
            raise RLActorsError(f"{self.name} has its workers in other processes (TP > 1): use apply_model")
        return worker.worker.model_runner

    # Memory (colocated GPUs)

    async def sleep(self, part: Part = "kv") -> None:
        """Give GPU memory back while paused: the KV cache, or everything ("weights": all must be synced again).

        Requests in flight are kept and computed again. `resume` wakes.
        """
        self._needs_gpu("sleep")
        await self._thread.call(lambda: self._sleep(part))

    def _sleep(self, part: Part) -> None:
        if not self._paused:
            raise SyncError(f"{self.name} is sampling: pause it before it sleeps")
        self._loaded().sleep(part)

    async def wake(self, *parts: str) -> None:
        """Take the memory again before `resume` does: "weights", "kv_cache", or both if none is named."""
        await self._thread.call(lambda: self._loaded().wake(*parts))

    def _needs_gpu(self, what: str) -> None:
        if self._device == "cpu":
            raise RLActorsError(f"{self.name}: {what} works on GPU only; on CPU an engine keeps its memory")

    # Health

    @ray.method(concurrency_group="control")
    async def health(self) -> dict[str, Any]:
        """Answers at once, also during a step: name, state, version, error, seconds since the present step began."""
        return {
            "name": self.name,
            "state": self._state(),
            "version": self._core.version if self._core else None,
            "step_s": self._thread.step_s,
            "error": str(self._error) if self._error else None,
        }

    @ray.method(concurrency_group="control")
    async def first_token_at(self) -> float | None:
        """Unix seconds at which the first token was there."""
        return self._loaded().first_token_at

    @ray.method(concurrency_group="control")
    async def stats(self) -> dict[str, float]:
        """The load and the work done.

        running, waiting: requests. kv_use, prefix_hit_rate: 0 to 1. preemptions, tokens, busy_s: since the start.
        tokens_per_s: of the time spent in steps since the last call. version: of the weights.
        """
        figures = self._loaded().stats()
        tokens, busy_s = figures["tokens"] - self._last_figures[0], figures["busy_s"] - self._last_figures[1]
        self._last_figures = figures["tokens"], figures["busy_s"]
        return figures | {"tokens_per_s": tokens / busy_s if busy_s else 0.0, "version": self._loaded().version}

    def _state(self) -> str:
        if self._error:
            return "failed"
        if self._core is None:
            return "starting"
        if self._paused:
            return "paused"
        return "running" if self._groups else "idle"

    # On the step thread

    def _has_work(self) -> bool:
        return self._core is not None and not self._paused and self._core.has_work()

    def _step(self) -> None:
        self._deliver(self._loaded().step())

    def _deliver(self, finished: list[Sample]) -> None:
        """Give a group's trajectories to its caller when its last sample is finished."""
        for sample in finished:
            group = self._groups.pop(sample.request_id)
            group.unfinished -= 1
            if not group.unfinished:
                texts = self._loaded().texts(group.samples)
                trajectories = [one.trajectory(text) for one, text in zip(group.samples, texts, strict=True)]
                group.future.set_result(trajectories)

    def _break(self, error: Exception) -> None:
        """A step failed. vLLM's state is unknown then, so the engine ends here and everyone is told."""
        groups = list(dict.fromkeys(self._groups.values()))
        self._groups.clear()
        cause = f"{self.name} failed in a sampling step ({type(error).__name__}: {' '.join(str(error).split())[:500]})"
        self._error = ActorDiedError(f"{cause} and must be restarted")
        for group in groups:
            lost = ActorDiedError(f"{cause}; lost {group}")
            lost.__cause__ = error
            group.future.set_exception(lost)

    def _loaded(self) -> VllmCore:
        if self._error is not None:
            raise self._error
        if self._core is None:
            raise ActorDiedError(f"{self.name} has no model: start() did not finish")
        return self._core


def _location(worker: Any) -> Location:
    return where_am_i()
