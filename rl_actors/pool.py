"""A pool of named Ray actors whose calls end: with answers, or with an error that names an actor.

Invariants:
- No wait is without a bound. A late actor is an ActorLateError, a dead one an ActorDiedError; both say which actor, on
  which node, bundle and GPU, in which call (the stage).
- The first failure of any actor ends a call. In a collective the survivors would wait for the dead one for ever.
- All actors get a call in the same order, so that collectives of two overlapping calls cannot cross.
- Actors never restart by themselves: `restart` puts one back onto its own bundle, on purpose.

Each actor has two concurrency groups. Its methods run one after the other in the default group; `ping`,
`where_am_i` and calls made with `control=True` run in the group "control", so they get through while a long call
runs. In an actor without async methods Ray runs the default group in one thread of its own, which is not the thread
of `__init__`: what is bound to a thread (the current CUDA device) must be set in a method.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import ObjectRef, exceptions

from placement.bundles import Placement, check
from placement.location import Location, where_am_i
from rl_actors.errors import ActorDiedError, ActorLateError

CONTROL_THREADS = 2
KILL_WAIT_S = 15.0
# Libraries' remarks on their own code; they would drown what a run says.
QUIET = {"PYTHONWARNINGS": "ignore::SyntaxWarning,ignore::DeprecationWarning,ignore::FutureWarning"}
_WAIT_SLICE_S = 1.0
_GONE = (
    exceptions.RayActorError,
    exceptions.WorkerCrashedError,
    exceptions.NodeDiedError,
    exceptions.OutOfMemoryError,
    exceptions.ActorPlacementGroupRemoved,
    exceptions.ActorUnschedulableError,
)


@dataclass(frozen=True)
class ActorSpec:
    """What one actor of a pool is made from.

    Attributes:
        name: unique in the run; on a placement it is the name of the plan's seat.
        args, kwargs: for the class's `__init__`.
        env_vars: set before the actor's process starts, such as {"OMP_NUM_THREADS": "1"}.
        num_cpus, num_gpus: what the actor reserves; a placement's seat decides instead where the pool has one.
    """

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    env_vars: Mapping[str, str] = field(default_factory=dict)
    num_cpus: float = 1.0
    num_gpus: float = 0.0


@dataclass
class PoolActor:
    """A running actor: its name, Ray handle, and where it says it is (None until it has started)."""

    name: str
    handle: Any
    where: Location | None = None


class ActorPool:
    """Named actors of one class.

    Args:
        actor_class: a plain class; the pool makes the Ray actor of it and adds `ping` and `where_am_i`.
        specs: one for each actor.
        run_name: prefix of the names Ray knows; the dashboard shows "run_name/trainer-0/rank-0 tp0 pp0 ep0".
        placement: where the actors belong; None lets Ray place them by the specs' resources.
        max_concurrency: of the default group; None is Ray's own (1 for plain methods, 1000 with async methods).
    """

    def __init__(
        self,
        actor_class: type,
        specs: Iterable[ActorSpec],
        run_name: str,
        placement: Placement | None = None,
        max_concurrency: int | None = None,
    ) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self.run_name = run_name
        self.placement = placement
        self.actors: dict[str, PoolActor] = {}
        self._submit_lock = threading.Lock()
        options: dict[str, Any] = {"max_restarts": 0, "concurrency_groups": {"control": CONTROL_THREADS}}
        if max_concurrency is not None:
            options["max_concurrency"] = max_concurrency
        remote: Any = ray.remote
        self._remote_class = remote(**options)(_with_control(actor_class))

    # ---- life ----

    def start(self, timeout_s: float) -> None:
        """Make all actors and wait until each has run its `__init__` and sits where it belongs.

        Raises:
            ActorLateError, ActorDiedError: an actor did not start; the message has its own error. All are killed.
            PlacementError: an actor sits elsewhere than planned. All are killed.
        """
        self._starting(list(self.specs))
        try:
            self._started(list(self.specs), self.call("where_am_i", timeout_s=timeout_s, control=True))
        except BaseException:
            self.kill()
            raise

    async def astart(self, timeout_s: float) -> None:
        """`start` for asyncio."""
        await asyncio.to_thread(self._starting, list(self.specs))
        try:
            self._started(list(self.specs), await self.acall("where_am_i", timeout_s=timeout_s, control=True))
        except BaseException:
            await self.akill()
            raise

    def restart(self, name: str, timeout_s: float) -> None:
        """Replace one actor, dead or alive, by a new one on the same bundle. Raises as `start` does."""
        deadline = time.monotonic() + timeout_s
        self.kill([name], wait_s=timeout_s)
        self._starting([name])
        left = max(0.1, deadline - time.monotonic())
        self._started([name], self.call("where_am_i", timeout_s=left, only=[name], control=True))

    async def arestart(self, name: str, timeout_s: float) -> None:
        """`restart` for asyncio."""
        deadline = time.monotonic() + timeout_s
        await self.akill([name], wait_s=timeout_s)
        await asyncio.to_thread(self._starting, [name])
        left = max(0.1, deadline - time.monotonic())
        self._started([name], await self.acall("where_am_i", timeout_s=left, only=[name], control=True))

    def kill(self, names: Sequence[str] | None = None, wait_s: float = KILL_WAIT_S) -> None:
        """End the actors' processes at once and wait, within a bound, until they are gone. The dead are no error."""
        if refs := self._killed(names):
            ray.wait(refs, num_returns=len(refs), timeout=wait_s)

    async def akill(self, names: Sequence[str] | None = None, wait_s: float = KILL_WAIT_S) -> None:
        """`kill` for asyncio."""
        if refs := self._killed(names):
            await asyncio.wait([_future(ref) for ref in refs], timeout=wait_s)

    # ---- calls ----

    def call(
        self,
        method: str,
        *args: Any,
        timeout_s: float,
        per_actor: Sequence[tuple[Any, ...]] | None = None,
        only: Sequence[str] | None = None,
        control: bool = False,
    ) -> list[Any]:
        """Call a method on every actor and wait for all answers, in the order of the specs.

        Args:
            args: for every actor. A large one is put into the object store once.
            timeout_s: bound on the whole call, in seconds.
            per_actor: for each actor further arguments, behind `args`.
            only: names of the actors to call, in this order; None is all.
            control: run beside a long call instead of behind it.

        Raises:
            ActorLateError: an actor did not answer in time; the call still runs there.
            ActorDiedError: an actor is gone.
            Exception: what the method itself raised, with a note that names the actor.
        """
        actors = self._chosen(only)
        refs = self._submit(actors, method, _share(args, len(actors)), per_actor, control)
        owner = dict(zip(refs, actors, strict=True))
        deadline = time.monotonic() + timeout_s
        answers: dict[ObjectRef, Any] = {}
        while pending := [ref for ref in refs if ref not in answers]:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._late([owner[ref] for ref in pending], method, timeout_s)
            ready, _ = ray.wait(pending, timeout=min(left, _WAIT_SLICE_S))
            for ref in ready:
                with self._named(owner[ref], method, timeout_s):
                    answers[ref] = ray.get(ref, timeout=max(left, 0.1))
        return [answers[ref] for ref in refs]

    async def acall(
        self,
        method: str,
        *args: Any,
        timeout_s: float,
        per_actor: Sequence[tuple[Any, ...]] | None = None,
        only: Sequence[str] | None = None,
        control: bool = False,
    ) -> list[Any]:
        """`call` for asyncio: the event loop goes on meanwhile. Cancelling it leaves the remote calls running."""
        actors = self._chosen(only)
        shared = await asyncio.to_thread(_share, args, len(actors)) if args else ()
        refs = self._submit(actors, method, shared, per_actor, control)
        futures = [_future(ref) for ref in refs]
        done, pending = await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        owner = dict(zip(futures, actors, strict=True))
        for future in done:
            with self._named(owner[future], method, timeout_s):
                future.result()
        if pending:
            raise self._late([actor for future, actor in owner.items() if future in pending], method, timeout_s)
        return [future.result() for future in futures]

    def ping(self, timeout_s: float) -> None:
        """Return when every actor's process answers, also during a long call."""
        self.call("ping", timeout_s=timeout_s, control=True)

    async def asilent(self, timeout_s: float) -> list[str]:
        """The actors that do not answer a ping in time, dead ones included, as errors describe them."""
        futures = {_future(self._submit([actor], "ping", (), None, True)[0]): actor for actor in self.actors.values()}
        if futures:
            await asyncio.wait(futures, timeout=timeout_s)
        return [
            self._describe(actor)
            for future, actor in futures.items()
            if not future.done() or future.exception() is not None
        ]

    # ---- within ----

    def _starting(self, names: list[str]) -> None:
        for name in names:
            spec = self.specs[name]
            options: dict[str, Any] = {"num_cpus": spec.num_cpus, "num_gpus": spec.num_gpus}
            if self.placement is not None:
                options = self.placement.actor_options(name)
            options["runtime_env"] = {"env_vars": {**QUIET, **spec.env_vars}}
            options["name"] = f"{self.run_name}/{name}"
            make = functools.partial(self._remote_class.options(**options).remote, *spec.args, **spec.kwargs)
            self.actors[name] = PoolActor(name, _once_the_name_is_free(make))

    def _killed(self, names: Sequence[str] | None) -> list[ObjectRef]:
        """Kill, and return calls that end, with an error, when the actors are gone."""
        chosen = [self.actors.pop(name) for name in (names or list(self.actors)) if name in self.actors]
        if not chosen or not ray.is_initialized():
            return []
        for actor in chosen:
            ray.kill(actor.handle, no_restart=True)
        return [actor.handle.ping.options(concurrency_group="control").remote() for actor in chosen]

    def _started(self, names: list[str], reports: list[Location]) -> None:
        for name, report in zip(names, reports, strict=True):
            self.actors[name].where = report
        if self.placement is not None:
            check(self.placement, dict(zip(names, reports, strict=True)))

    def _chosen(self, only: Sequence[str] | None) -> list[PoolActor]:
        names = list(self.specs) if only is None else list(only)
        if gone := [name for name in names if name not in self.actors]:
            raise ActorDiedError(
                f"actor {gone[0]} of run {self.run_name} is not running: it was never started, or killed"
            )
        return [self.actors[name] for name in names]

    def _submit(
        self,
        actors: list[PoolActor],
        method: str,
        shared: tuple[Any, ...],
        per_actor: Sequence[tuple[Any, ...]] | None,
        control: bool,
    ) -> list[ObjectRef]:
        if per_actor is not None and len(per_actor) != len(actors):
            raise ValueError(f"{method}: per_actor has {len(per_actor)} entries for {len(actors)} actors")
        own = per_actor if per_actor is not None else [()] * len(actors)
        options = {"concurrency_group": "control"} if control else {}
        with self._submit_lock:
            return [
                getattr(actor.handle, method).options(**options).remote(*shared, *extra)
                for actor, extra in zip(actors, own, strict=True)
            ]

    @contextlib.contextmanager
    def _named(self, actor: PoolActor, method: str, timeout_s: float) -> Iterator[None]:
        """Turn Ray's errors into ours; a method's own error keeps its type and gets a note."""
        try:
            yield
        except exceptions.RayTaskError as error:
            error.add_note(f"raised by {self._describe(actor)} in {method}")
            raise
        except exceptions.GetTimeoutError as error:
            raise self._late([actor], method, timeout_s) from error
        except _GONE as error:
            raise ActorDiedError(f"{self._describe(actor)} died in {method}: {_reason(error)}") from error

    def _late(self, actors: list[PoolActor], method: str, timeout_s: float) -> ActorLateError:
        who = "; ".join(self._describe(actor) for actor in actors)
        return ActorLateError(f"{method} did not end within {timeout_s:g} s on {who}")

    def _describe(self, actor: PoolActor) -> str:
        where = f" on {actor.where}" if actor.where else " (not started yet)"
        bundle = f", bundle {self.placement.bundle_name(actor.name)}" if self.placement is not None else ""
        return f"actor {actor.name}{where}{bundle}"


def _with_control(actor_class: type) -> type:
    """The class with the two calls that every pool needs."""

    def ping(self: Any) -> None:
        """Answer."""

    def report(self: Any) -> Location:
        """Where this actor is."""
        return where_am_i()

    return type(actor_class.__name__, (actor_class,), {"ping": ping, "where_am_i": report})


def _share(args: tuple[Any, ...], readers: int) -> tuple[Any, ...]:
    """Put what several actors read into the object store once; Ray hands the value to each."""
    plain = (int, float, str, bool, type(None), ObjectRef)
    return tuple(arg if readers < 2 or isinstance(arg, plain) else ray.put(arg) for arg in args)


def _future(ref: ObjectRef) -> asyncio.Future[Any]:
    """A future of an answer, whose error nobody has to look at (the first failure ends a call, others may follow)."""
    future = asyncio.wrap_future(ref.future())
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def _once_the_name_is_free(make: Callable[[], Any]) -> Any:
    """Make an actor; Ray frees the name of a killed one a moment after its death."""
    deadline = time.monotonic() + KILL_WAIT_S
    while True:
        try:
            return make()
        except ValueError as error:
            if "already" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _reason(error: BaseException) -> str:
    """The line of a Ray error that says most: the last one of an `__init__` that failed, else what Ray knows."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if getattr(error, "actor_init_failed", False):
        return f"its start failed with {lines[-1]}"
    known = [
        line for line in lines if line.startswith(("The actor is dead", "The actor died", "Worker exit", "The actor's"))
    ]
    return " ".join(known[-1:] or lines[-1:])
