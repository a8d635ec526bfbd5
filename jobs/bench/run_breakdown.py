"""What a run reached: `python -m jobs.bench.run_breakdown RUN_DIR [--skip 1] [--json]`, from its files alone.

Tokens per second and GPU of each stage, seconds of each stage of a step, sync, peak memory, and times of the start. The
first steps compile kernels: --skip leaves them out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from jobs.cli import count, run
from placement.layout import EngineLayout, MegatronLayout
from rl_actors.config import RunConfig
from rl_actors.config_file import load_config
from rl_actors.errors import ConfigError
from rl_actors.json_object import json_object, reason
from rl_actors.tracking.read_run import read_run
from rl_actors.tracking.records import STAGES, StepRecord, plain
from rl_actors.tracking.stage_times import step_seconds
from rl_actors.tracking.summary import SUMMARY_FILE


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m jobs.bench.run_breakdown", description=(__doc__ or ""))
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--skip", type=count, default=1, help="first steps to leave out (default 1)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON and no table")
    arguments = parser.parse_args()
    result = breakdown(arguments.run_dir, arguments.skip)
    print(json.dumps(result)) if arguments.json else show(result)
    return 0


def breakdown(run_dir: Path, skip: int = 0) -> dict[str, Any]:
    """Figures of the steps behind the first `skip`.

    Raises:
        ConfigError: no folder of a run, its files are damaged, or no step is left.
    """
    metrics, spans = read_run(run_dir)
    records = metrics.steps
    steps = records[skip:]
    if not steps:
        raise ConfigError(f"{run_dir} has {len(records)} steps and the first {skip} are left out: lower --skip")
    config = load_config(run_dir / "config.yaml")
    rollout_s = step_seconds([span for span in spans if span.stage == "rollout"])
    return plain(  # type: ignore[no-any-return]
        {
            "steps": len(steps),
            "step_s": float(np.mean([record.step_s for record in steps])),
            "stage_s": _stage_seconds(steps),
            "sync_gb_per_s": sum(r.sync_bytes for r in steps) / max(1e-9, sum(r.sync_s for r in steps)) / 1e9,
            **_rates(config, steps, rollout_s),
            "trainer_peak_gib": max((r.extra.get("max/trainer_peak_gib", 0.0) for r in steps), default=0.0),
            "gpu_used_gib": max((r.extra.get("max/gpu_used_gib", 0.0) for r in steps), default=0.0),
            "seconds_until": _milestones(run_dir / SUMMARY_FILE),
        }
    )


def _milestones(summary: Path) -> dict[str, float]:
    """Of the start; none where the run has not ended."""
    if not summary.is_file():
        return {}
    try:
        return TypeAdapter(dict[str, float]).validate_python(json_object(summary.read_bytes()).get("seconds_until", {}))
    except (OSError, ValueError) as error:
        what = f"is not what a run writes there ({reason(error)})"
        raise ConfigError(f"{summary} {what}: remove it to read the rest") from error


def _stage_seconds(steps: Sequence[StepRecord]) -> dict[str, float]:
    stages = [stage for stage in STAGES if any(stage in record.seconds for record in steps)]
    return {stage: float(np.mean([record.seconds.get(stage, 0.0) for record in steps])) for stage in stages}


def _rates(config: RunConfig, steps: Sequence[StepRecord], rollout_s: dict[int, float]) -> dict[str, float]:
    """Tokens per second and GPU: trained (prompt and answer) while a stage of the trainer ran, sampled in rollout."""
    ranks = MegatronLayout.from_config(config.trainer).world_size
    workers = EngineLayout.from_config(config.rollout).workers
    answers = config.pipeline.prompts_per_step * config.pipeline.samples_per_prompt
    sampled = sum(record.response_length_mean * answers for record in steps)
    trained = sum(record.tokens_trained for record in steps)

    def rate(tokens: float, seconds: float, gpus: int) -> float:
        return tokens / seconds / gpus if seconds > 0 else float("nan")

    def total(*stages: str) -> float:
        return sum(record.seconds.get(stage, 0.0) for record in steps for stage in stages)

    return {
        "rollout_tokens_per_s_per_gpu": rate(sampled, sum(rollout_s.get(r.step, 0.0) for r in steps), workers),
        "logprob_tokens_per_s_per_gpu": rate(trained, total("logprob"), ranks),
        "update_tokens_per_s_per_gpu": rate(trained, total("update"), ranks),
        "trainer_tokens_per_s_per_gpu": rate(trained, total("logprob", "ref_logprob", "update"), ranks),
    }


def show(result: dict[str, Any]) -> None:
    """The same as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "value", title=f"Mean of {result['steps']} steps", title_justify="left", box=None)
    table.columns[1].justify = "right"
    for name, value in result.items():
        for key, number in value.items() if isinstance(value, dict) else [("", value)]:
            shown = "-" if number is None else f"{number:.3f}" if abs(number) < 100 else f"{number:.0f}"
            table.add_row(f"{name} {key}".strip(), shown)
    Console(width=120).print(table)


if __name__ == "__main__":
    run(main)
