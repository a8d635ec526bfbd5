"""All engines of a run behind one `generate`.

A prompt goes to the serving engine with the fewest answers under way. An engine that died, or failed in a step, is
reported by name and its prompts go to the others; `restart_dead` puts a new one on the same bundles. A new engine holds
the base model, so it does not serve before a sync has given it the weights of the present version, which is what
`resume(version)` says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from placement.bundles import BundleSpot, Placement, check
from placement.plan import Device
from rl_actors.actor_environment import gpu_environment
from rl_actors.config import RunConfig
from rl_actors.errors import ActorDiedError, ActorLateError
from rl_actors.pool import ActorPool, ActorSpec
from rl_actors.rollout.engine import RolloutEngine
from rl_actors.rollout.samples import Sampling
from rl_actors.rollout.sleep import WEIGHTS
from rl_actors.rollout.vllm_settings import engine_environment
from rl_actors.types import Prompt, Trajectory

logger = logging.getLogger(__name__)

State = Literal["serving", "behind", "dead"]
"""behind: alive, but without the present weights."""

ANSWER_MARGIN_S = 30.0
"""How much longer the pool waits than the engine, which aborts and explains a late prompt itself."""
MAX_PROMPTS_UNDER_WAY = 10_000
"""Calls an engine takes at once. Calls beyond it would keep a sync from being heard."""


@dataclass
class _Engine:
    """What the pool knows of an engine: `actor` is its name in the plan; `life` counts its restarts."""

    name: str
    actor: str
    state: State = "behind"
    answers_under_way: int = 0
    life: int = 0


class RolloutPool:
    """The engines of a run. Use it from one event loop.

    Args:
        config: the run.
        placement: where the engines sit; None lets Ray place them (CPU only).
        device: "cpu" or "gpu", already decided.
        run_name: prefix of the actors' names.

    Attributes:
        actors: one actor for each engine, in order; weight sync talks to them.
        lost_requests: prompts that were sent again because their engine died.
        lost_engines: how often an engine died.
    """

    def __init__(self, config: RunConfig, placement: Placement | None, device: Device, run_name: str) -> None:
        self._config = config
        self._placement = placement
        self._sampling = Sampling.for_training(config.rollout)
        names = [f"engine-{index}" for index in range(config.rollout.engines)]
        self._engines = {name: _Engine(name, f"{name}/worker-0") for name in names}
        specs = [
            ActorSpec(engine.actor, (engine.name, config, device), env_vars=self._environment(engine, device))
            for engine in self._engines.values()
        ]
        seats = placement
        if placement is not None and config.rollout.tp > 1:
            seats = _DriverSeats(placement.plan, placement.groups, placement.spots)
        self.actors = ActorPool(RolloutEngine, specs, run_name, seats, max_concurrency=MAX_PROMPTS_UNDER_WAY)
        self.lost_requests = 0
        self.lost_engines = 0
        self._changed = asyncio.Condition()

    def _environment(self, engine: _Engine, device: Device) -> dict[str, str]:
        environment = engine_environment(device, self._config.rollout.threads_per_engine)
        if device == "gpu":
            environment |= gpu_environment(self._config, "engine")
        if self._placement is not None and self._config.rollout.tp > 1:
            seats = [self._placement.seat(worker) for worker in self._workers(engine)]
            spots = [self._placement.spot(seat.group, seat.position) for seat in seats]
            # vLLM starts the TP workers itself, on these bundles of the group that the engine's actor sits in.
            environment["VLLM_RAY_BUNDLE_INDICES"] = ",".join(str(spot.index) for spot in spots)
            environment["VLLM_RAY_PER_WORKER_GPUS"] = str(seats[0].num_gpus)
        return environment

    def _workers(self, engine: _Engine) -> list[str]:
        return [f"{engine.name}/worker-{worker}" for worker in range(self._config.rollout.tp)]

    # Life

    async def start(self) -> None:
        """Start all engines at once, with the base model as version 0, serving.

        Raises:
            ActorLateError, ActorDiedError, PlacementError: an engine did not start; none is left.
        """
        start_s = self._config.timeouts.start_s
        await self.actors.astart(start_s)
        try:
            await self._load(list(self._engines.values()))
        except BaseException:
            await self.actors.akill()
            raise
        await self._set_state(list(self._engines.values()), "serving")

    @property
    def started(self) -> bool:
        """The engines hold the model."""
        return any(engine.state == "serving" for engine in self._engines.values())

    async def _load(self, engines: list[_Engine]) -> None:
        names, start_s = [engine.actor for engine in engines], self._config.timeouts.start_s
        times = await self.actors.acall("start", timeout_s=start_s, only=names)
        for engine, took in zip(engines, times, strict=True):
            logger.info("%s started in %.1f s", engine.name, took["start_s"])
        if self._placement is not None and self._config.rollout.tp > 1:
            locations = await self.actors.acall("worker_locations", timeout_s=start_s, only=names)
            for engine, found in zip(engines, locations, strict=True):
                check(self._placement, dict(zip(self._workers(engine), found, strict=True)))

    async def restart_dead(self) -> list[str]:
        """Replace every dead engine by a new one on the same bundles; returns their names.

        Asks all engines first, since nobody misses one that died with nothing under way. The new ones are paused and do
        not serve before the next `resume(version)`, which must follow a sync that reached them.
        """
        await self._look_for_dead()
        dead = [engine for engine in self._engines.values() if engine.state == "dead"]
        await asyncio.gather(*(self._restart(engine) for engine in dead))
        return [engine.name for engine in dead]

    async def _look_for_dead(self) -> None:
        engines = [engine for engine in self._engines.values() if engine.state != "dead"]
        limit_s = self._config.timeouts.sync_s
        calls = [self._call(engine, "health", timeout_s=limit_s, control=True) for engine in engines]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for engine, outcome in zip(engines, outcomes, strict=True):
            if isinstance(outcome, ActorDiedError | ActorLateError):
                await self._lose(engine, engine.life, outcome)
            elif isinstance(outcome, dict) and outcome["state"] == "failed":
                await self._lose(engine, engine.life, ActorDiedError(f"{engine.name} failed: {outcome['error']}"))

    async def restart(self, name: str) -> None:
        """Replace one engine, dead or alive. Its prompts are sent again."""
        await self._restart(self._engines[name])

    async def _restart(self, engine: _Engine) -> None:
        start_s = self._config.timeouts.start_s
        await self._set_state([engine], "dead")
        engine.life += 1
        await self.actors.arestart(engine.actor, start_s)
        await self._load([engine])
        await self._call(engine, "pause", timeout_s=self._config.timeouts.sync_s, control=True)
        await self._set_state([engine], "behind")

    def states(self) -> dict[str, State]:
        """For each engine: "serving", "behind" (waits for a sync) or "dead"."""
        return {engine.name: engine.state for engine in self._engines.values()}

    # Sampling

    async def generate(
        self, prompt: Prompt, samples: int, seed: int, sampling: Sampling | None = None
    ) -> list[Trajectory]:
        """Sample answers to one prompt; call it for many prompts at once, engines batch them as they come.

        Args:
            samples: independent answers.
            seed: together with prompt id and sample index it decides the randomness, whichever engine answers.
            sampling: None takes the run's; an evaluation takes `Sampling.for_training(...).with_temperature(...)`.

        Returns:
            `samples` trajectories in the order of their sample index.

        Raises:
            ConfigError: the prompt leaves no room for an answer.
            ActorLateError: no answer within timeouts.rollout_s.
            ActorDiedError: all engines are dead; `restart_dead` and a sync bring them back.
        """
        timeout_s = self._config.timeouts.rollout_s
        try:
            async with asyncio.timeout(timeout_s + 2 * ANSWER_MARGIN_S):
                while True:
                    engine = await self._least_loaded()
                    life = engine.life
                    try:
                        return await self._generate_on(engine, prompt, samples, seed, sampling)
                    except ActorDiedError as error:
                        await self._lose(engine, life, error)
                        self.lost_requests += 1
        except TimeoutError:
            states = ", ".join(f"{name} {state}" for name, state in self.states().items())
            raise ActorLateError(
                f"prompt {prompt.id!r} got no answer within timeouts.rollout_s ({timeout_s:g} s) in stage rollout; "
                f"engines: {states}"
            ) from None

    async def _generate_on(
        self, engine: _Engine, prompt: Prompt, samples: int, seed: int, sampling: Sampling | None
    ) -> list[Trajectory]:
        timeout_s = self._config.timeouts.rollout_s
        arguments = prompt, samples, seed, sampling or self._sampling, timeout_s
        engine.answers_under_way += samples
        try:
            return await self._call(engine, "generate_one", *arguments, timeout_s=timeout_s + ANSWER_MARGIN_S)
        finally:
            engine.answers_under_way -= samples

    async def _least_loaded(self) -> _Engine:
        """Wait until an engine serves. Raises ActorDiedError if none is left that a sync could bring to that."""
        async with self._changed:
            while not (serving := [engine for engine in self._engines.values() if engine.state == "serving"]):
                if all(engine.state == "dead" for engine in self._engines.values()):
                    raise ActorDiedError(f"no engine is left to sample: {', '.join(self._engines)} died; restart them")
                await self._changed.wait()
            return min(serving, key=lambda engine: engine.answers_under_way)

    # Weights

    async def pause(self) -> None:
        """Stop all living engines at a step boundary; requests in flight are kept."""
        await self._tell_living("pause")

    async def resume(self, version: int | None = None) -> None:
        """Go on. A version says that all living engines have its weights; None, that nothing changed."""
        if version is None:
            await self._tell_living("resume", only_serving=True)
            return
        await self._tell_living("resume", version)
        await self._set_state([one for one in self._engines.values() if one.state != "dead"], "serving")

    async def _tell_living(self, method: str, *arguments: Any, only_serving: bool = False) -> None:
        """Call all living engines; one that died meanwhile is lost, and it is an error if none is left."""
        wanted = ("serving",) if only_serving else ("serving", "behind")
        engines = [engine for engine in self._engines.values() if engine.state in wanted]
        calls = [
            self._call(engine, method, *arguments, timeout_s=self._config.timeouts.sync_s, control=True)
            for engine in engines
        ]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for engine, outcome in zip(engines, outcomes, strict=True):
            if isinstance(outcome, ActorDiedError):
                await self._lose(engine, engine.life, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
        if engines and all(engine.state == "dead" for engine in engines):
            raise ActorDiedError(f"no engine is left to {method}: {', '.join(e.name for e in engines)} died")

    # Memory

    async def sleep(self) -> None:
        """Pause all living engines and let them give back what `rollout.sleep` says; `resume` wakes them."""
        part = self._config.rollout.sleep
        await self.pause()
        if part != "never":
            await self._tell_living("sleep", part)

    async def wake_weights(self) -> None:
        """Take the memory of the weights again, to be filled by a sync; the KV cache waits for `resume`."""
        await self._tell_living("wake", WEIGHTS)

    # Figures

    async def first_token_at(self) -> float | None:
        """Unix seconds at which the first token of any living engine was there."""
        engines = [engine for engine in self._engines.values() if engine.state != "dead"]
        calls = [self._call(engine, "first_token_at", timeout_s=ANSWER_MARGIN_S, control=True) for engine in engines]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        return min((time for time in outcomes if isinstance(time, float)), default=None)

    async def stats(self) -> dict[str, float]:
        """Load and work of all living engines together; see `RolloutEngine.stats`.

        Sums, but for kv_use and prefix_hit_rate, which are means. Also lost_requests, lost_engines and serving.
        """
        engines = [engine for engine in self._engines.values() if engine.state != "dead"]
        calls = [self._call(engine, "stats", timeout_s=ANSWER_MARGIN_S, control=True) for engine in engines]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        figures = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
        together = {
            key: sum(one[key] for one in figures) for key in (figures[0] if figures else ()) if key != "version"
        }
        for mean in {"kv_use", "prefix_hit_rate"} & together.keys():
            together[mean] /= len(figures)
        serving = sum(engine.state == "serving" for engine in engines)
        counts = {"lost_requests": self.lost_requests, "lost_engines": self.lost_engines, "serving": serving}
        return together | counts

    # Within

    async def _call(
        self, engine: _Engine, method: str, *arguments: Any, timeout_s: float, control: bool = False
    ) -> Any:
        answers = await self.actors.acall(method, *arguments, timeout_s=timeout_s, only=[engine.actor], control=control)
        return answers[0]

    async def _lose(self, engine: _Engine, life: int, error: ActorDiedError | ActorLateError) -> None:
        """Report a dead engine once: all its requests come here, some of them after it was replaced."""
        if engine.state != "dead" and engine.life == life:
            self.lost_engines += 1
            logger.warning("%s is lost, with %d answers under way: %s", engine.name, engine.answers_under_way, error)
            await self._set_state([engine], "dead")

    async def _set_state(self, engines: Sequence[_Engine], state: State) -> None:
        async with self._changed:
            for engine in engines:
                engine.state = state
            self._changed.notify_all()


class _DriverSeats(Placement):
    """Seats of engines with TP workers: the engine's actor sits on the first worker's bundle and takes no GPU there,
    because vLLM starts a worker of its own on each bundle of the engine, also on the first."""

    def actor_options(self, actor: str) -> dict[str, Any]:
        return super().actor_options(actor) | {"num_gpus": 0}

    def spot(self, group: str, position: int) -> BundleSpot:
        spot = super().spot(group, position)
        return BundleSpot(spot.index, spot.node_id)
