"""The driver's side: plan once, then one control call to everybody for each version.

    pause engines -> all send, all receive -> every checksum matches -> resume as the new version

Invariant: engines resume with a version only after every worker has acknowledged what it received. Until then they stay
paused; a failed sync tears its group down, so that nobody is left waiting, and the next one meets in a new group.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError

from rl_actors.config import SyncConfig
from rl_actors.errors import ActorDiedError, ActorLateError, RLActorsError, SyncError
from rl_actors.weight_sync.collective import abort_group
from rl_actors.weight_sync.holdings import Holdings
from rl_actors.weight_sync.members import EngineMembers, Members, TrainerMembers
from rl_actors.weight_sync.plan import Part, SyncPlan, make_plan
from rl_actors.weight_sync.shards import Piece
from rl_actors.weight_sync.transport import choose_transport

if TYPE_CHECKING:
    from rl_actors.rollout.receiver import ReceiveReport
    from rl_actors.weight_sync.sender import SendReport

__all__ = ["BaseCheck", "EngineMembers", "SyncReport", "TrainerMembers", "WeightSync"]

log = logging.getLogger(__name__)

JOIN_MARGIN_S = 15.0
"""A call's own timeout beyond that of the waits within it, so that the error comes from where it happened."""
CLEAN_UP_S = 10.0
SILENCE_S = 3.0
"""Who does not answer a ping for so long is named in the error of a failed sync."""


@dataclass(frozen=True)
class SyncReport:
    """One published version.

    Attributes:
        seconds: engines were paused for this long.
        transfer_s: of them, from the control call to the last acknowledgement.
        merge_s, wait_s: of the slowest trainer rank, merging and waiting for receivers.
        bytes: that arrived, over all engine workers.
        transport: "gloo", "nccl", "cuda_ipc" or "shared_memory".
        peak_extra_bytes: of the trainer rank that needed most.
        reloaded, written: modules that went through vLLM's reload, and all that were written, over all workers.
    """

    version: int
    seconds: float
    transfer_s: float
    merge_s: float
    wait_s: float
    bytes: int
    transport: str
    peak_extra_bytes: int
    reloaded: int
    written: int

    @property
    def gb_per_s(self) -> float:
        return self.bytes / self.transfer_s / 1e9

    def __str__(self) -> str:
        return (
            f"version {self.version}: {self.bytes / 1e6:.1f} MB over {self.transport} in {self.transfer_s:.3f} s "
            f"({self.gb_per_s:.2f} GB/s), engines paused {self.seconds:.3f} s"
        )


@dataclass(frozen=True)
class BaseCheck:
    """How many elements of the engines were compared with the trainer's, bit for bit, and what could not be."""

    compared: int
    unread: tuple[str, ...]


class WeightSync:
    """Moves merged weights from a trainer to engines.

    Args:
        trainer, engines: the two sides.
        pause, resume: of all engines; `resume` takes the version they serve from then on.
        config: bucket size and transport.
        timeout_s: bound of every single wait of a sync.
        run_name: makes group names of different runs on one cluster differ.
        colocate: trainer ranks and engine workers share GPUs.
        engines_differ: engines start with weights of their own, so each `set_up` first gives them all of the trainer's.
        send_all: every version is all weights, not only those with an adapter.
    """

    def __init__(
        self,
        trainer: Members,
        engines: Members,
        pause: Callable[[], Awaitable[Any]],
        resume: Callable[[int], Awaitable[Any]],
        config: SyncConfig,
        timeout_s: float,
        run_name: str,
        colocate: bool = False,
        engines_differ: bool = False,
        send_all: bool = False,
    ) -> None:
        self._trainer, self._engines = trainer, engines
        self._pause, self._resume = pause, resume
        self._wanted, self._colocate = config.transport, colocate
        self._engines_differ, self._send_all = engines_differ, send_all
        self._transport = ""
        self._bucket_bytes = int(config.bucket_mib * 2**20)
        self._timeout_s = timeout_s
        self._run_name = run_name
        self._group: str | None = None
        self._plan: SyncPlan | None = None
        self.ways: list[dict[str, bool]] = []

    async def set_up(self, check_base: bool = True) -> BaseCheck | None:
        """Describe both sides, plan, and let all members meet. Engines must be paused, and stay so.

        Args:
            check_base: also compare all readable engine weights with the trainer's base; only right before the first
                sync, while the engines hold the base model.

        Raises:
            SyncError: the two sides do not hold the same model, or somebody did not come.
        """
        ranks, workers = await self._describe()
        if self._engines_differ:
            await self._make_equal(ranks, workers)
        checked = await self._check_base(ranks, workers) if check_base else None
        self._plan = self._make_plan(ranks, workers, self._send_all)
        await self._meet(self._plan)
        log.info("weight sync of %d tensors, %d elements", self._plan.tensors, self._plan.elements)
        return checked

    async def _make_equal(self, ranks: list[Holdings], workers: list[Holdings]) -> None:
        """Send all weights once, in a group of its own."""
        await self._meet(self._make_plan(ranks, workers, everything=True))
        sent, received, transfer_s = await self._transfer(0)
        self._compare(0, sent, received)
        total = sum(report.bytes for report in received)
        log.info("engines got all weights, %.1f MB, in %.1f s", total / 1e6, transfer_s)
        await self._leave()
        self._group = None

    def _make_plan(self, ranks: list[Holdings], workers: list[Holdings], everything: bool) -> SyncPlan:
        """Of adapted weights alone, or of everything."""
        if everything and (unread := sorted({name for holdings in ranks for name in holdings.unread})):
            raise SyncError(f"no engine could take {', '.join(unread[:3])}: they have no known Hugging Face tensor")
        return make_plan(
            [holdings.adapted + (holdings.fixed if everything else []) for holdings in ranks],
            [holdings.adapted for holdings in workers],
            self._engines.engines,
            self._bucket_bytes // workers[0].dtype.itemsize,
            ([holdings.place for holdings in ranks], [holdings.place for holdings in workers]),
        )

    def invalidate(self) -> None:
        """A member was replaced: the next `run` plans and meets anew."""
        if self._group is not None:
            abort_group(self._group, "the group is rebuilt because a member was replaced")
        self._group = None

    async def run(self, version: int) -> SyncReport:
        """Bring the engines to the trainer's present weights and publish them as `version`.

        Raises:
            SyncError: the version is not served by all engines; those without it are paused or dead. Call again, after
                replacing what is dead.
        """
        started = time.perf_counter()
        try:
            await self._bounded(self._pause(), "pause")
            if self._group is None:
                await self._leave()
                await self.set_up(check_base=False)
            sent, received, transfer_s = await self._transfer(version)
            self._compare(version, sent, received)
            await self._bounded(self._resume(version), "resume")
        except (RLActorsError, RayError) as error:
            self.invalidate()
            ranks, workers = await asyncio.gather(self._trainer.silent(SILENCE_S), self._engines.silent(SILENCE_S))
            raise _as_sync_error(error, f"weight version {version} was not published", ranks + workers) from error
        except BaseException:
            self.invalidate()
            raise
        return SyncReport(
            version=version,
            seconds=time.perf_counter() - started,
            transfer_s=transfer_s,
            merge_s=max(report.merge_s for report in sent),
            wait_s=max(report.wait_s for report in sent),
            bytes=sum(report.bytes for report in received),
            transport=self._transport,
            peak_extra_bytes=max(report.peak_extra_bytes for report in sent),
            reloaded=sum(report.reloaded for report in received),
            written=sum(report.written for report in received),
        )

    async def close(self) -> None:
        """Leave the group, within a bound; dead members are no error. The engines are paused for it, and stay so."""
        await self._bounded(self._pause(), "pause")
        await self._leave()
        self._group = None

    async def _describe(self) -> tuple[list[Holdings], list[Holdings]]:
        ranks, workers = await self._both("describe", [()] * self._ranks, [()] * self._workers)
        members = [*ranks, *workers]
        types = {str(holdings.dtype) for holdings in members}
        devices = {holdings.device for holdings in members}
        if len(types) > 1 or len(devices) > 1:
            raise SyncError(
                f"trainer and engines must hold weights of one type on one kind of device: found {sorted(types)} on "
                f"{sorted(devices)}"
            )
        self._transport = choose_transport(self._wanted, devices.pop(), self._colocate)
        return ranks, workers

    async def _check_base(self, ranks: list[Holdings], workers: list[Holdings]) -> BaseCheck:
        """Compare checksums of all rectangles that both sides can read: everything at its place, and the same."""
        readable = set.intersection(*({piece.box.name for piece in holdings.fixed} for holdings in workers))
        plan = make_plan(
            [_named(holdings.adapted + holdings.fixed, readable) for holdings in ranks],
            [_named(holdings.fixed, readable) for holdings in workers],
            self._engines.engines,
            self._bucket_bytes,
        )
        base, copies = _rectangles(plan)
        ours, theirs = await self._both(
            "checksums", [(tuple(parts),) for parts in base], [(tuple(parts for _, _, parts in c),) for c in copies]
        )
        for worker, (rectangles, sums) in enumerate(zip(copies, theirs, strict=True)):
            for (sender, index, part), total in zip(rectangles, sums, strict=True):
                if total != ours[sender][index]:
                    raise SyncError(
                        f"engine worker {worker} holds other values in {part.param}{list(part.local)} than the base "
                        f"of trainer rank {sender} in {base[sender][index].param}: they did not load the same model"
                    )
        unread = {name for holdings in [*ranks, *workers] for name in holdings.unread}
        return BaseCheck(plan.elements, tuple(sorted(unread)))

    async def _meet(self, plan: SyncPlan) -> None:
        # A name is used once: members of an earlier group may still be on their way out of it.
        name = self._group = f"{self._run_name}-weights-{uuid.uuid4().hex[:8]}"
        world = self._ranks + self._workers
        try:
            last = (self._timeout_s, self._transport)
            links, self.ways = await self._both(
                "join",
                [(name, r, world, self._ranks, plan.sends[r], *last) for r in range(self._ranks)],
                [(name, self._ranks + w, world, plan.receives[w], *last) for w in range(self._workers)],
            )
        except BaseException:
            self.invalidate()
            raise
        for link in sorted({link for sent in links for link in sent}):
            log.info("weight sync over %s: %.1f MB of each version", link, sum(s.get(link, 0) for s in links) / 1e6)
        for kind, direct in sorted({kind: direct for ways in self.ways for kind, direct in ways.items()}.items()):
            log.info("%s: %s", kind, "written in place" if direct else "reloaded, its kernels use another layout")

    async def _transfer(self, version: int) -> tuple[list[SendReport], list[ReceiveReport], float]:
        started = time.perf_counter()
        send = self._trainer.call("send", [(version,)] * self._ranks, self._call_s)
        receive = self._engines.call("receive", [(version,)] * self._workers, self._call_s)
        sent, received = await self._together(send, receive)
        return sent, received, time.perf_counter() - started

    def _compare(self, version: int, sent: list[SendReport], received: list[ReceiveReport]) -> None:
        for worker, report in enumerate(received):
            expected = {
                (rank, tag): total
                for rank, sending in enumerate(sent)
                for (receiver, tag), total in sending.checksums.items()
                if receiver == worker
            }
            if report.version != version or report.checksums != expected:
                wrong = sorted(k for k in expected if report.checksums.get(k) != expected[k])
                raise SyncError(
                    f"engine worker {worker} acknowledged version {report.version} with {len(wrong)} of "
                    f"{len(expected)} checksums wrong; the first is (trainer rank, message) {wrong[:1]}"
                )

    async def _leave(self) -> None:
        """Best effort: whoever is dead or stuck has left in its own way."""
        calls = [
            self._trainer.call("leave", [()] * self._ranks, CLEAN_UP_S),
            self._engines.call("leave", [()] * self._workers, CLEAN_UP_S),
        ]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException):
                log.info("leaving the weight sync group: %s", outcome)

    async def _both(self, method: str, ranks: list[tuple], workers: list[tuple]) -> tuple[list[Any], list[Any]]:
        return await self._together(
            self._trainer.call(method, ranks, self._call_s), self._engines.call(method, workers, self._call_s)
        )

    async def _together(
        self, first: Coroutine[Any, Any, list[Any]], second: Coroutine[Any, Any, list[Any]]
    ) -> tuple[list[Any], list[Any]]:
        """Both results, or the first failure: the group is aborted then, and the other side ends by itself."""
        tasks = [asyncio.ensure_future(first), asyncio.ensure_future(second)]
        try:
            ranks, workers = await asyncio.gather(*tasks)
            return ranks, workers
        except (RLActorsError, RayError) as error:
            if self._group is not None:
                abort_group(self._group, f"the sync failed: {_short(error)}")
            finished, _ = await asyncio.wait(tasks, timeout=min(CLEAN_UP_S, self._timeout_s))
            # A survivor may notice a death before Ray tells us of it; the death is what the user must know.
            for death in (task.exception() for task in finished):
                if isinstance(death, ActorDiedError):
                    raise death from error
            raise
        finally:
            for task in tasks:
                task.cancel()

    async def _bounded(self, call: Awaitable[Any], what: str) -> None:
        try:
            await asyncio.wait_for(call, self._call_s)
        except TimeoutError:
            raise SyncError(f"the engines did not {what} within {self._call_s:g} s") from None

    @property
    def _ranks(self) -> int:
        return len(self._trainer.engines)

    @property
    def _workers(self) -> int:
        return len(self._engines.engines)

    @property
    def _call_s(self) -> float:
        return self._timeout_s + JOIN_MARGIN_S


def _named(pieces: list[Piece], names: set[str]) -> list[Piece]:
    return [piece for piece in pieces if piece.box.name in names]


def _rectangles(plan: SyncPlan) -> tuple[list[list[Part]], list[list[tuple[int, int, Part]]]]:
    """Sender's rectangles, and for each receiver (sender, index of the sender's rectangle, own rectangle)."""
    base: list[list[Part]] = [[] for _ in plan.sends]
    place: dict[tuple[int, int, int], int] = {}
    for sender, rounds in enumerate(plan.sends):
        for message in (message for one in rounds for message in one.messages):
            for receiver, tag in zip(message.receivers, message.tags, strict=True):
                place[sender, receiver, tag] = len(base[sender])
            base[sender] += message.parts
    copies = [
        [
            (header.sender, place[header.sender, worker, header.tag] + index, part)
            for header in headers
            for index, part in enumerate(header.parts)
        ]
        for worker, headers in enumerate(plan.receives)
    ]
    return base, copies


def _as_sync_error(error: Exception, what: str, silent: list[str]) -> SyncError:
    if isinstance(error, (ActorDiedError, ActorLateError)):
        return SyncError(f"{what}: {error}; its engine or rank must be replaced before the next try")
    stuck = f"; no sign of life from {', '.join(silent)}" if silent else ""
    return SyncError(f"{what}: {_short(error)}{stuck}")


def _short(error: BaseException) -> str:
    """An error's own words; Ray's text of a remote one is its whole traceback."""
    cause = getattr(error, "cause", None) or error
    return str(cause) or type(cause).__name__
