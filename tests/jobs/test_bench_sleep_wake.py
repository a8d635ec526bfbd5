"""The verdict of the sleep benchmark, and its refusals; cycles themselves need a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jobs.bench.sleep_wake import GIB, Cycle, summarize
from rl_actors.config_file import parse_config
from rl_actors.errors import ConfigError

CYCLE = Cycle(awake=10 * GIB, asleep=14 * GIB, again=10 * GIB, sleep_s=0.1, wake_s=0.2, sync_s=0.3)


def test_steady_cycles_are_ok() -> None:
    first = replace(CYCLE, awake=11 * GIB)
    result = summarize([first, *[CYCLE] * 5], promised=3 * GIB)
    assert result["ok"] and result["freed_bytes"] == 3 * GIB and result["growth_asleep_bytes"] == 0


@pytest.mark.parametrize("spoilt", [{"asleep": 12 * GIB}, {"again": 9 * GIB}])
def test_memory_that_does_not_come_back_fails(spoilt: dict[str, int]) -> None:
    cycles = [*[CYCLE] * 5, replace(CYCLE, **spoilt)]
    assert summarize([CYCLE] * 6, promised=4 * GIB)["ok"]
    assert not summarize(cycles, promised=2 * GIB)["ok"]


def test_less_than_promised_fails() -> None:
    assert not summarize([CYCLE] * 5, promised=5 * GIB)["ok"]


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"pipeline": {"max_staleness": 0}}, "no trainer shares the engines' GPUs"),
        (
            {
                "placement": {"colocate": True},
                "pipeline": {"max_staleness": 0},
                "rollout": {"sleep": "weights"},
                "sync": {"mode": "adapter"},
            },
            "set rollout.sleep to kv",
        ),
        ({"placement": {"colocate": True}}, "engines that sample during the update cannot sleep"),
    ],
)
def test_sleep_where_it_cannot_work_is_refused(sections: dict, sentence: str) -> None:
    tree = {"run_dir": "runs/a", "model": {"path": "m"}, "data": {"train": "d"}, "rollout": {"sleep": "kv"}}
    with pytest.raises(ConfigError, match=sentence):
        parse_config(tree | sections, "test")
