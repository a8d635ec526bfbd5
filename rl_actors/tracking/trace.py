"""When what ran: RUN_DIR/trace.json in Chrome's trace format; open it in https://ui.perfetto.dev.

A pool is a process of the trace, and its concurrent spans lie on numbered lanes, so that spans of one lane never
overlap (the viewers need that). Times are Unix microseconds, so a resumed run goes on behind its first attempt.

Invariant: the file loads whenever the run is killed. It is the format's JSON array with one event a line, flushed at
once; the viewers and `read_trace` accept an array without its end.
Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rl_actors.json_object import json_object
from rl_actors.tracking.records import bad_line, plain

POOLS = ("driver", "rollout", "reward", "trainer", "sync")
"""Pools in the order in which a viewer shows them; others come after these."""

TRACE_FILE = "trace.json"


@dataclass(frozen=True)
class Span:
    """One stage of one step on one pool; times are Unix seconds."""

    stage: str
    step: int
    pool: str
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class TraceWriter:
    """Writes RUN_DIR/trace.json; safe to use from several threads and from async code.

    Args:
        run_dir: must exist.
        resume: go on behind the events of an earlier attempt; otherwise an old file is kept as trace.previous.json.
    """

    def __init__(self, run_dir: Path, resume: bool = False) -> None:
        path = run_dir / TRACE_FILE
        if path.exists() and not resume:
            path.replace(path.with_suffix(".previous.json"))
        self._lock = threading.Lock()
        self._pids: dict[str, int] = _reopen(path)
        self._file = path.open("a", encoding="utf-8")
        self._busy: dict[str, set[int]] = {}
        self._named: set[tuple[int, int]] = set()
        # Wall time at the start plus a clock that never steps back.
        self._offset_s = time.time() - time.perf_counter()
        for pool in POOLS:
            self._pid(pool)

    def now(self) -> float:
        """Unix seconds on this trace's own clock."""
        return self._offset_s + time.perf_counter()

    @contextmanager
    def span(self, stage: str, step: int, pool: str, **args: Any) -> Iterator[None]:
        """Record the block as one span, also when it raises (the error's type is then in its arguments)."""
        with self._lock:
            busy = self._busy.setdefault(pool, set())
            lane = next(lane for lane in range(len(busy) + 1) if lane not in busy)
            busy.add(lane)
        start_s = self.now()
        try:
            yield
        except BaseException as error:
            args["error"] = type(error).__name__
            raise
        finally:
            with self._lock:
                busy.discard(lane)
                self._write_span(Span(stage, step, pool, start_s, self.now()), lane, args)

    def add(self, span: Span, lane: int = 0, **args: Any) -> None:
        """Record a span that was measured elsewhere, such as in an actor."""
        with self._lock:
            self._write_span(span, lane, args)

    def instant(self, name: str, pool: str = "driver", **args: Any) -> None:
        """Mark a moment, such as a restart."""
        with self._lock:
            self._write({"ph": "i", "s": "p", "name": name, "pid": self._pid(pool), "tid": 0, "args": args})

    def counter(self, name: str, value: float) -> None:
        """Add a point to a curve shown above the lanes."""
        with self._lock:
            self._write({"ph": "C", "name": name, "pid": self._pid("driver"), "args": {name: value}})

    def close(self) -> None:
        """End the array, so that the file is plain JSON as well. Later events are ignored."""
        with self._lock:
            if not self._file.closed:
                self._write({"ph": "i", "s": "g", "name": "end", "pid": self._pid("driver"), "tid": 0}, end="\n]\n")
                self._file.close()

    def _write_span(self, span: Span, lane: int, args: dict[str, Any]) -> None:
        pid = self._pid(span.pool)
        if (pid, lane) not in self._named:
            self._named.add((pid, lane))
            self._write(_metadata("thread_name", pid, lane, name=f"{span.pool} {lane}" if lane else span.pool))
        self._write(
            {
                "ph": "X",
                "name": span.stage,
                "cat": span.pool,
                "pid": pid,
                "tid": lane,
                "ts": round(span.start_s * 1e6, 3),
                "dur": round(span.seconds * 1e6, 3),
                "args": {"step": span.step, **args},
            }
        )

    def _pid(self, pool: str) -> int:
        if pool not in self._pids:
            pid = self._pids[pool] = len(self._pids) + 1
            self._write(_metadata("process_name", pid, 0, name=pool))
            self._write(_metadata("process_sort_index", pid, 0, sort_index=pid))
        return self._pids[pool]

    def _write(self, event: dict[str, Any], end: str = ",\n") -> None:
        if self._file.closed:
            return
        event.setdefault("ts", round(self.now() * 1e6, 3))
        self._file.write(json.dumps(plain(event)) + end)
        self._file.flush()


def read_trace(run_dir: str | Path) -> list[Span]:
    """All spans of RUN_DIR/trace.json in order of their start; works on a killed run's file.

    Raises:
        FileNotFoundError: the run folder has no trace.json.
        ConfigError: a line other than a torn last one is no event.
    """
    path = Path(run_dir) / TRACE_FILE
    spans = []
    for number, event in _events(path):
        try:
            if event["ph"] == "X":
                start_s, seconds = event["ts"] / 1e6, event["dur"] / 1e6
                if not math.isfinite(start_s + seconds):
                    raise ValueError("its times are not numbers")
                spans.append(
                    _SPAN.validate_python(
                        {
                            "stage": event["name"],
                            "step": event["args"]["step"],
                            "pool": event["cat"],
                            "start_s": start_s,
                            "end_s": start_s + seconds,
                        }
                    )
                )
        except (ValueError, LookupError, TypeError, OverflowError) as error:
            raise bad_line(path, number, error) from error
    return sorted(spans, key=lambda span: span.start_s)


_SPAN = TypeAdapter(Span)


def overlaps(spans: Sequence[Span], first: str, second: str) -> float:
    """Seconds during which a span of stage `first` and one of stage `second` ran at the same time."""
    firsts, seconds = (union((s.start_s, s.end_s) for s in spans if s.stage == stage) for stage in (first, second))
    total, i, j = 0.0, 0, 0
    while i < len(firsts) and j < len(seconds):
        total += max(0.0, min(firsts[i][1], seconds[j][1]) - max(firsts[i][0], seconds[j][0]))
        if firsts[i][1] < seconds[j][1]:
            i += 1
        else:
            j += 1
    return total


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The time covered by any of the intervals, as disjoint intervals in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds covered by any of the intervals."""
    return sum(end - start for start, end in union(intervals))


def _reopen(path: Path) -> dict[str, int]:
    """Make `path` an array without its end, earlier events kept; answers the process id of each pool in it."""
    events = [event for _, event in _events(path)] if path.exists() else []
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(["[\n", *(f"{json.dumps(event)},\n" for event in events)]), encoding="utf-8")
    temporary.replace(path)
    return {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _events(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and content of each whole event; brackets and a torn last line are left out."""
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if line.strip() in (b"[", b"]", b""):
            continue
        if not line.endswith(b"\n"):
            return
        try:
            event = json_object(line.rstrip(b",\n"))
            if not {"ph", "name", "pid"} <= event.keys():
                raise ValueError("it is no event")
        except ValueError as error:
            raise bad_line(path, number, error) from error
        yield number, event
