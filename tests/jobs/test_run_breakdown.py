"""What a run reached, from the files of a run whose numbers are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.bench.run_breakdown import breakdown
from rl_actors.config_file import dump_config, parse_config
from rl_actors.errors import ConfigError
from rl_actors.tracking.records import StepRecord
from rl_actors.tracking.trace import Span
from rl_actors.tracking.tracker import Tracker


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two steps on 2 trainer ranks and 4 engine workers; the first took long."""
    tree = {
        "run_dir": str(tmp_path),
        "model": {"path": "m"},
        "data": {"train": "d"},
        "trainer": {"replicas": 2},
        "rollout": {"engines": 2, "tp": 2},
        "pipeline": {"prompts_per_step": 4, "samples_per_prompt": 8},
        "tracking": {"wandb": "off"},
    }
    config = parse_config(tree, "test")
    (tmp_path / "config.yaml").write_text(dump_config(config))
    tracker = Tracker(config, tmp_path)
    tracker.milestone("first_update")
    for step, start in ((1, 0.0), (2, 100.0)):
        for stage, pool, begin, end in (
            ("rollout", "rollout", 0, 2),
            ("rollout", "rollout", 1, 4),  # together 4 seconds
            ("logprob", "trainer", 4, 5),
            ("update", "trainer", 5, 8),
            ("sync", "sync", 8, 8.5),
        ):
            tracker.add_span(Span(stage, step, pool, start + begin, start + end))
        tracker.step(
            StepRecord(
                step=step,
                version=step,
                reward_mean=0.0,
                response_length_mean=10.0 if step == 2 else 1.0,
                tokens_trained=600,
                sync_bytes=10**9,
                step_s=9.0 if step == 2 else 90.0,
                extra={"max/trainer_peak_gib": 3.5},
            )
        )
    tracker.finish()
    return tmp_path


def test_rates_count_gpus_and_covered_seconds(run_dir: Path) -> None:
    result = breakdown(run_dir, skip=1)
    assert (result["steps"], result["step_s"]) == (1, 9.0)
    assert result["stage_s"] == pytest.approx({"logprob": 1.0, "update": 3.0, "sync": 0.5})
    assert result["rollout_tokens_per_s_per_gpu"] == pytest.approx(10 * 32 / 4 / 4)
    assert result["logprob_tokens_per_s_per_gpu"] == pytest.approx(600 / 1 / 2)
    assert result["update_tokens_per_s_per_gpu"] == pytest.approx(600 / 3 / 2)
    assert result["trainer_tokens_per_s_per_gpu"] == pytest.approx(600 / 4 / 2)
    assert result["sync_gb_per_s"] == pytest.approx(2.0)
    assert result["trainer_peak_gib"] == 3.5
    assert set(result["seconds_until"]) == {"first_update"}


def test_no_step_left_is_an_error(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 2 steps and the first 2 are left out"):
        breakdown(run_dir, skip=2)
    with pytest.raises(ConfigError, match=r"is not the folder of a run, .*: there is nothing"):
        breakdown(tmp_path / "nothing")


@pytest.mark.parametrize("content", ["[]", "{", '{"seconds_until": 5}', '{"seconds_until": {"first_update": "soon"}}'])
def test_a_summary_that_is_none_is_named(run_dir: Path, content: str) -> None:
    (run_dir / "summary.json").write_text(content)
    with pytest.raises(ConfigError, match=r"summary\.json is not what a run writes there .*: remove it") as caught:
        breakdown(run_dir)
    assert "\n" not in str(caught.value)
