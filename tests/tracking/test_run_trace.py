"""trace.json loads whenever the run is killed, and says what ran at the same time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rl_actors.errors import ConfigError
from rl_actors.tracking.trace import Span, TraceWriter, overlaps, read_trace


def span(stage: str, start_s: float, end_s: float, step: int = 1) -> Span:
    return Span(stage, step, "trainer", start_s, end_s)


def events(run_dir: Path) -> list[dict]:
    return json.loads((run_dir / "trace.json").read_text())


@pytest.mark.parametrize(
    ("rollouts", "expected"),
    [
        ([(0, 10)], 3.0),
        ([(0, 2.5), (2, 2.8)], 0.8),
        ([(4, 6), (4, 6), (4.5, 5)], 1.0),
        ([(2, 3), (4, 5)], 2.0),
        ([(5, 9)], 0.0),
    ],
    ids=[
        "covers all",
        "two that overlap count once",
        "concurrent ones count once",
        "several",
        "touching is not overlap",
    ],
)
def test_overlap_is_the_time_in_which_both_run(rollouts: list[tuple[float, float]], expected: float) -> None:
    spans = [span("update", 2, 4), span("update", 4, 5)] + [span("rollout", *times) for times in rollouts]
    assert overlaps(spans, "rollout", "update") == pytest.approx(expected)
    assert overlaps(spans, "update", "rollout") == pytest.approx(expected)


def test_concurrent_spans_of_a_pool_lie_on_lanes_of_their_own(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path)

    async def rollout(step: int, seconds: float) -> None:
        with trace.span("rollout", step, "rollout", prompts=4):
            await asyncio.sleep(seconds)

    async def both() -> None:
        await asyncio.gather(rollout(1, 0.05), rollout(2, 0.03))
        await rollout(3, 0.01)

    asyncio.run(both())
    trace.close()
    lanes = {event["args"]["step"]: event["tid"] for event in events(tmp_path) if event["ph"] == "X"}
    assert lanes == {1: 0, 2: 1, 3: 0}
    spans = {s.step: s for s in read_trace(tmp_path)}
    assert spans[1].seconds >= 0.049 and spans[3].start_s >= spans[1].end_s


def test_failing_span_is_written_with_its_error(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path)
    with pytest.raises(KeyError), trace.span("update", 1, "trainer"):
        raise KeyError("x")
    trace.close()
    assert [event["args"].get("error") for event in events(tmp_path) if event["ph"] == "X"] == ["KeyError"]


KILLED = """
import sys
from pathlib import Path
from rl_actors.errors import ConfigError
from rl_actors.tracking.trace import TraceWriter
trace = TraceWriter(Path(sys.argv[1]))
with trace.span("update", 1, "trainer"):
    pass
print("written", flush=True)
with trace.span("update", 2, "trainer"):
    sys.stdin.read()
"""


def test_killed_run_leaves_a_trace_that_loads_and_can_go_on(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None and child.stdout.readline() == b"written\n"
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    with (tmp_path / "trace.json").open("a") as file:
        file.write('{"ph": "X", "na')  # what a kill in the middle of a write leaves
    assert [s.step for s in read_trace(tmp_path)] == [1]

    trace = TraceWriter(tmp_path, resume=True)
    with trace.span("update", 2, "trainer"):
        pass
    # The viewers' own rule for an array without its end: cut at the last comma and close it.
    json.loads((tmp_path / "trace.json").read_text().rstrip().rstrip(",") + "]")
    trace.close()
    assert [s.step for s in read_trace(tmp_path)] == [1, 2]
    assert len({event["pid"] for event in events(tmp_path) if event["ph"] == "X"}) == 1


@pytest.mark.parametrize(
    "line",
    [
        "garbage",
        "[1]",
        '{"ph": "X"}',
        '{"ph": "X", "name": "update", "pid": 1, "cat": "trainer", "ts": "now", "dur": 1, "args": {"step": 1}}',
        '{"ph": "X", "name": "update", "pid": 1, "cat": "trainer", "ts": 0, "dur": NaN, "args": {"step": 1}}',
        '{"ph": "X", "name": "update", "pid": 1, "cat": "trainer", "ts": 0, "dur": 1, "args": null}',
    ],
)
def test_what_is_no_event_is_named_by_its_line(tmp_path: Path, line: str) -> None:
    TraceWriter(tmp_path).close()
    path = tmp_path / "trace.json"
    before = path.read_text().count("\n")
    with path.open("a") as file:
        file.write(f"{line},\n")
    with pytest.raises(ConfigError, match=rf"trace\.json, line {before + 1} is not .*: remove it to read"):
        read_trace(tmp_path)


def test_lanes_are_named_after_the_pools(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path)
    with trace.span("update", 1, "trainer"):
        trace.counter("reward", 0.5)
        trace.instant("engine-0 restarted")
    trace.close()
    names = [event["args"]["name"] for event in events(tmp_path) if event["name"] == "process_name"]
    assert names == ["driver", "rollout", "reward", "trainer", "sync"]
