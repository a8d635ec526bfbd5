"""Stage times count covered wall time, so that many spans at once are not many times the time."""

from __future__ import annotations

import pytest

from rl_actors.tracking.stage_times import idle_seconds, overlap_table, pool_shares, stage_times, wall_seconds
from rl_actors.tracking.trace import Span

SPANS = [
    Span("rollout", 1, "rollout", 0.0, 4.0),
    Span("rollout", 1, "rollout", 1.0, 4.0),
    Span("rollout", 2, "rollout", 4.0, 7.0),
    Span("rollout_wait", 1, "driver", 0.0, 4.0),
    Span("update", 1, "trainer", 4.0, 6.0),
    Span("update", 2, "trainer", 8.0, 12.0),
]


def test_stage_row() -> None:
    rows = {row.stage: row for row in stage_times(SPANS)}
    update = rows["update"]
    assert (update.steps, update.total_s, update.mean_s, update.max_s) == (2, 6.0, 3.0, 4.0)
    assert rows["rollout"].total_s == 7.0
    assert update.share == pytest.approx(6 / 11)


def test_wall_idle_and_pools() -> None:
    assert wall_seconds(SPANS) == 11.0
    assert idle_seconds(SPANS) == 1.0
    assert pool_shares(SPANS) == {"rollout": pytest.approx(7 / 11), "trainer": pytest.approx(6 / 11)}


def test_overlap_is_a_share_of_the_shorter() -> None:
    (row,) = overlap_table(SPANS)
    assert (row.second, row.seconds, row.share) == ("update", 2.0, pytest.approx(2 / 6))
