"""A run folder has one writer, and a checkpoint continues only the run it belongs to."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.train import set_old_run_aside
from rl_actors.config import RunConfig
from rl_actors.data.order import PromptOrder
from rl_actors.driver.run_folder import only_writer, read_step, write_driver_state
from rl_actors.errors import CheckpointError, ConfigError
from tests.driver.live_pools import make_config


def config_and_order(folder: Path, prompts: int = 64, **sections: dict) -> tuple[RunConfig, PromptOrder]:
    config = make_config(folder, folder, **sections)
    return config, PromptOrder(prompts, config.seed, config.data.shuffle)


def test_a_second_writer_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match="a run belongs to a run that is going on")
    with only_writer(tmp_path / "a run"), refused, only_writer(tmp_path / "a run"):
        raise AssertionError("two writers")
    with only_writer(tmp_path / "a run"):
        pass


def test_a_run_that_goes_on_is_not_set_aside(tmp_path: Path) -> None:
    config, _ = config_and_order(tmp_path / "a run", checkpoint={"resume": "never"})
    with (
        only_writer(config.run_path),
        pytest.raises(ConfigError, match="belongs to a run that is going on"),
    ):
        set_old_run_aside(config)
    set_old_run_aside(config)
    assert not config.run_path.exists() and len(list(tmp_path.glob("a run.*"))) == 1


def test_the_step_comes_back(tmp_path: Path) -> None:
    config, order = config_and_order(tmp_path)
    write_driver_state(tmp_path, config, 7, order)
    more_steps, order = config_and_order(tmp_path, pipeline={"steps": 99, "max_staleness": 3})
    assert read_step(tmp_path, more_steps, order) == 7


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"step": "7"}', "[" * 100_000])
def test_a_damaged_state_is_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "driver.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"has no readable driver\.json .*: remove the checkpoint") as caught:
        read_step(tmp_path, *config_and_order(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"lora": {"rank": 4}}, "'rank': 8.*'rank': 4"),
        ({"pipeline": {"prompts_per_step": 5}}, "prompts_per_step was 4 and is now 5"),
        ({"prompts": 63}, "data"),
    ],
)
def test_another_runs_checkpoint_is_refused(tmp_path: Path, change: dict, named: str) -> None:
    write_driver_state(tmp_path, *(lambda config, order: (config, 7, order))(*config_and_order(tmp_path)))
    with pytest.raises(CheckpointError, match=named):
        read_step(tmp_path, *config_and_order(tmp_path, **change))
