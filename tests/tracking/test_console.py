"""On a pipe the console prints few whole lines; on a terminal it draws one bar."""

from __future__ import annotations

import io

import pytest

from rl_actors.tracking.console import Console, PlacedActor, progress_text
from rl_actors.tracking.records import EvalRecord, RunMetrics, StepRecord
from rl_actors.tracking.stage_times import stage_times
from rl_actors.tracking.summary import build_summary
from rl_actors.tracking.trace import Span


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def step(number: int) -> StepRecord:
    return StepRecord(
        step=number,
        version=number,
        reward_mean=0.4321,
        staleness_mean=0.75,
        staleness_max=1,
        seconds={"sync": 0.123},
        step_s=2.0,
        tokens_trained=3000,
    )


def test_line_names_reward_staleness_sync_and_speed() -> None:
    assert progress_text(step(1)) == "reward 0.432  staleness 0.75 (max 1)  sync 0.12 s  1500 tokens/s"


def test_unknown_numbers_are_left_out() -> None:
    assert progress_text(StepRecord(step=1, version=1, reward_mean=0.5)) == "reward 0.500"


def test_pipe_gets_first_and_last_step_and_no_carriage_return() -> None:
    stream = io.StringIO()
    console = Console(total=100, stream=stream, interval_s=60)
    for number in range(1, 101):
        console.step(step(number))
    lines = stream.getvalue().splitlines()
    assert "\r" not in stream.getvalue()
    assert [line.split()[1] for line in lines] == ["1/100", "100/100"]
    assert all("reward 0.432" in line and "sync 0.12 s" in line for line in lines)


def test_pipe_line_after_each_interval() -> None:
    stream = io.StringIO()
    console = Console(total=5, stream=stream, interval_s=0)
    for number in range(1, 6):
        console.step(step(number))
    assert len(stream.getvalue().splitlines()) == 5


def test_resumed_run_is_timed_from_its_own_first_step() -> None:
    """Of 50 steps 2 were made here, in almost no time: the rest cannot take long."""
    stream = io.StringIO()
    console = Console(total=50, stream=stream, interval_s=0)
    console._started -= 10  # 10 s since the pools were up
    console.step(step(41))
    console.step(step(42))
    assert "41/50" in stream.getvalue() and "00:10<00:40" in stream.getvalue()


def test_terminal_gets_a_bar_that_counts_from_the_resumed_step() -> None:
    stream = Terminal()
    console = Console(total=10, stream=stream)
    console.step(step(5))
    console.evaluation(5, 0.5)
    console.close()
    assert "\r" in stream.getvalue() and "5/10" in stream.getvalue()
    assert "evaluation after step 5: reward 0.500\n" in stream.getvalue()


@pytest.mark.parametrize("gpus", ["", "0 (GPU-1f2e)"])
def test_start_table_shows_every_actor_and_the_dashboard(gpus: str) -> None:
    stream = io.StringIO()
    actors = [PlacedActor("trainer", f"rank-{i}", f"trainer-0/{i}", "node-a", gpus, 100 + i) for i in range(2)]
    Console(total=1, stream=stream).start(actors, "http://127.0.0.1:8265")
    text = stream.getvalue()
    assert "rank-0" in text and "trainer-0/1" in text and "101" in text
    assert ("GPU" in text) == bool(gpus)
    assert "Dashboard: http://127.0.0.1:8265" in text


def test_end_table_sums_the_run_up() -> None:
    stream = io.StringIO()
    record = step(4)
    metrics = RunMetrics([record], [EvalRecord(step=0, value=0.25), EvalRecord(step=4, value=0.5)])
    spans = [Span("rollout", 1, "rollout", 0.0, 4.0), Span("update", 1, "trainer", 2.0, 4.0)]
    console = Console(total=4, stream=stream)
    console.finish(build_summary(metrics, 12.0, {}), stage_times(spans))
    for text in ("0.250 before, 0.500 after", "4 in 12.0 s", "mean 0.750, max 1", "rollout 100%, update 50%"):
        assert text in stream.getvalue(), text
