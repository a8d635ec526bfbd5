"""Every measurement can start as it is written, and one that fails or hangs leaves the others alone."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from jobs.bench.everything import Measurement, choose, make_folder, measure, measurements
from rl_actors.config_file import load_config
from rl_actors.errors import ConfigError

LISTS = {device: measurements(device == "gpu", Path("/results")) for device in ("cpu", "gpu")}


@pytest.mark.parametrize("device", LISTS)
def test_recipes_and_overrides_are_accepted(device: str) -> None:
    names = [one.name for one in LISTS[device]]
    assert len(set(names)) == len(names)
    for one in LISTS[device]:
        recipe = [word for word in one.command if word.endswith(".yaml")]
        if recipe:
            config = load_config(recipe[0], [word for word in one.command if "=" in word])
            assert config.placement.colocate == (device == "gpu")


def test_names_choose_what_starts_with_them() -> None:
    assert {one.name for one in choose(LISTS["gpu"], ["sleep", "lora-step"])} == {
        "sleep-wake-kv",
        "sleep-wake-weights",
        "lora-step",
    }
    for name in ("nothing", ""):
        with pytest.raises(ConfigError, match=f"--only '{name}' is no measurement: use verify-moe"):
            choose(LISTS["cpu"], ["sync", name])


def test_results_of_two_calls_do_not_mix(tmp_path: Path) -> None:
    make_folder(tmp_path / "new")
    make_folder(tmp_path / "new")
    (tmp_path / "new" / "small.log").touch()
    with pytest.raises(ConfigError, match="new is not empty: give a new folder"):
        make_folder(tmp_path / "new")
    with pytest.raises(ConfigError, match="/proc/1/x"):
        make_folder(Path("/proc/1/x"))


def test_each_ends_by_itself_or_at_its_limit(tmp_path: Path) -> None:
    small = ("jobs.bench.logprobs", "--tokens", "64", "--vocabulary", "256", "--device", "cpu", "--json")
    outcome, _ = measure(Measurement("small", small), tmp_path)
    assert outcome == "done"
    assert json.loads((tmp_path / "small.json").read_text())["rows"]
    assert measure(Measurement("bad", ("jobs.plan", "missing.yaml")), tmp_path)[0] == "exit code 2"
    assert "missing.yaml" in (tmp_path / "bad.log").read_text()
    late = Measurement("late", ("http.server", "0", "--bind", "127.0.0.1"), limit_s=1)
    outcome, seconds = measure(late, tmp_path)
    assert outcome == "stopped after 1 s" and seconds < 15
    assert not any("http.server" in child.cmdline() for child in psutil.Process().children(recursive=True))
