"""The notebooks run, on a run folder as the Tracker writes it, and are committed without outputs."""

from __future__ import annotations

import random
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from rl_actors.config_file import parse_config
from rl_actors.tracking.records import StepRecord
from rl_actors.tracking.trace import Span
from rl_actors.tracking.tracker import Tracker

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def write_run(run_dir: Path, steps: int = 12) -> None:
    """A run of `steps` steps of 4 s, in which the next rollout goes on while a step is trained."""
    config = parse_config(
        {
            "run_dir": str(run_dir),
            "model": {"path": "model"},
            "data": {"train": "train.jsonl"},
            "pipeline": {"steps": steps},
            "tracking": {"wandb": "off"},
        },
        "test",
    )
    tracker = Tracker(config, run_dir)
    tracker.evaluation(0, 0.3)
    chance, start = random.Random(0), time.time() - 4 * steps
    for step in range(1, steps + 1):
        begin = start + 4 * (step - 1)
        for stage, pool, first, last in [
            ("rollout", "rollout", 1.2, 5.0),
            ("rollout_wait", "driver", 0.0, 1.0),
            ("reward", "reward", 1.0, 1.2),
            ("logprob", "trainer", 1.2, 2.0),
            ("update", "trainer", 2.0, 3.7),
            ("sync", "sync", 3.7, 3.8 + 0.1 * chance.random()),
        ]:
            tracker.add_span(Span(stage, step + (stage == "rollout"), pool, begin + first, begin + last))
        tracker.step(
            StepRecord(
                step=step,
                version=step,
                reward_mean=0.3 + 0.04 * step + 0.05 * chance.random(),
                loss=-0.01,
                grad_norm=1.0,
                entropy=1.0 - 0.05 * step,
                tis={"mean": 0.99},
                uniform_fraction=0.25,
                truncated_fraction=0.1,
                response_length_mean=12.0,
                staleness_mean=0.5,
                staleness_max=step % 2,
                step_s=4.0,
                sync_bytes=2_000_000,
                tokens_trained=4000,
                buffer_depth=step % 3,
            )
        )
    tracker.evaluation(steps, 0.8)
    tracker.finish()


def test_read_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "quickstart")
    monkeypatch.setenv("RL_ACTORS_RUN_DIR", str(tmp_path / "quickstart"))
    notebook = nbformat.read(NOTEBOOKS / "read_a_run.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": NOTEBOOKS}})
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    texts = "".join(output.get("text", "") for output in outputs)
    assert len(pictures) == 6, "reward, staleness, stage times, time line, sync, learning"
    assert "12 steps, 2 evaluations" in texts and not any(output.get("name") == "stderr" for output in outputs), texts


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_committed_without_outputs(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None
