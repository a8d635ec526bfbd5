"""The driver's one window to everything that keeps a run's numbers; `console` shows what it answers.

    tracker = Tracker(config, config.run_path, resume_step=None)
    tracker.evaluation(0, value)
    with tracker.span("update", step=1, pool="trainer"):
        ...
    tracker.step(StepRecord(step=1, version=1, reward_mean=0.4))
    summary = tracker.finish()

Invariant: disk first. A record is in metrics.jsonl before anything else sees it, so what a dashboard or W&B showed can
always be found there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_actors.config import RunConfig
from rl_actors.tracking.console import configure_logging
from rl_actors.tracking.ray_metrics import RayMetrics
from rl_actors.tracking.records import EvalRecord, MetricsWriter, StepRecord, read_metrics
from rl_actors.tracking.summary import CURVE_FILE, SUMMARY_FILE, build_summary, plot_reward_curve, write_json
from rl_actors.tracking.trace import Span, TraceWriter, length
from rl_actors.tracking.wandb import WandbWriter


class Tracker:
    """Fans steps, evaluations and spans out to disk, Ray metrics and W&B.

    Args:
        config: the run's configuration; `tracking` and `pipeline.steps` are used, all of it is logged to W&B.
        run_dir: made if missing.
        resume_step: the last step of the checkpoint that the run goes on from; what lies behind it is cut. None
            starts anew and keeps earlier files as *.previous.*.
    """

    def __init__(self, config: RunConfig, run_dir: str | Path, resume_step: int | None = None) -> None:
        configure_logging()
        self._config = config
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        resumed = resume_step is not None
        self._metrics = MetricsWriter(self.run_dir, resume_step)
        self._trace = TraceWriter(self.run_dir, resume=resumed)
        name = config.tracking.name or self.run_dir.name
        self._ray = RayMetrics(name)
        self._wandb = WandbWriter(
            config.tracking.wandb,
            config.tracking.project,
            name,
            self.run_dir,
            config.model_dump(mode="json"),
            resume=resumed,
        )
        self._spans: dict[int, list[Span]] = {}
        earlier = read_metrics(self.run_dir)
        times = [record.elapsed_s for record in earlier.steps] + [record.elapsed_s for record in earlier.evals]
        self._earlier_s = max(times, default=0.0)
        self._started = self._step_ended = time.monotonic()
        self._started_at = time.time()
        self._milestones: dict[str, float] = {}

    def start(self) -> None:
        """The pools are up: the time of the first step counts from here."""
        self._step_ended = time.monotonic()

    @contextmanager
    def span(self, stage: str, step: int, pool: str, **args: Any) -> Iterator[None]:
        """Time the block as `stage` of `step` on `pool`: trace, Ray histogram, and the step's record.

        Works around awaits, and many may be open at once. A block that raises stays in the trace only.
        """
        start_s = self._trace.now()
        with self._trace.span(stage, step, pool, **args):
            yield
        self._measured(Span(stage, step, pool, start_s, self._trace.now()))

    def add_span(self, span: Span, lane: int = 0, **args: Any) -> None:
        """Like `span`, for a stage that was timed elsewhere (Unix seconds)."""
        self._trace.add(span, lane, **args)
        self._measured(span)

    def instant(self, name: str, **args: Any) -> None:
        """Mark a moment in the trace, such as the restart of an engine."""
        self._trace.instant(name, **args)

    def milestone(self, name: str, at: float | None = None) -> None:
        """Note how long after the start of this attempt something happened for the first time (at: Unix seconds)."""
        self._milestones.setdefault(name, (at or time.time()) - self._started_at)

    def reached(self, name: str) -> bool:
        """Whether the milestone is noted."""
        return name in self._milestones

    def step(self, record: StepRecord) -> StepRecord:
        """Take the numbers of one finished step; answers them as written.

        `seconds` and `step_s` are filled from the spans and the clock where the driver left them empty. Call it after
        the spans of the step (its sync included) have closed; a stage that ends later, such as a checkpoint, counts for
        the next record, as its time does.
        """
        now = time.monotonic()
        record = replace(
            record,
            seconds=record.seconds or self._stage_seconds(record.step),
            step_s=record.step_s or now - self._step_ended,
            elapsed_s=self._elapsed_s(),
        )
        self._step_ended = now
        for step in [step for step in self._spans if step <= record.step]:
            del self._spans[step]
        self._metrics.write(record)
        self._trace.counter("reward", record.reward_mean)
        self._trace.counter("staleness", record.staleness_mean)
        self._trace.counter("buffer depth", record.buffer_depth)
        self._ray.step(record)
        self._wandb.log(record.flat())
        return record

    def evaluation(self, step: int, value: float) -> EvalRecord:
        """Take the mean reward on the held-out prompts after `step` steps (0: before training)."""
        record = EvalRecord(step=step, value=value, elapsed_s=self._elapsed_s())
        self._metrics.write(record)
        self._ray.evaluation(record)
        self._wandb.log({"step": step, "eval/reward": value})
        return record

    def finish(self, summary: Mapping[str, Any] | None = None, failed: bool = False) -> dict[str, Any]:
        """Close everything; write summary.json and reward_curve.png unless the run failed.

        Args:
            summary: more for summary.json; it wins over what is computed from the records.
            failed: the run ended in an error: files are closed, nothing is said to be finished.
        """
        self._metrics.close()
        self._trace.close()
        metrics = read_metrics(self.run_dir)
        result = build_summary(metrics, self._elapsed_s(), {"seconds_until": self._milestones, **(summary or {})})
        if not failed:
            write_json(self.run_dir / SUMMARY_FILE, result)
            title = f"Reward of {self.run_dir.name}"
            plot_reward_curve(metrics, self.run_dir / CURVE_FILE, title, self._config.pipeline.max_staleness)
        self._wandb.finish(exit_code=int(failed))
        return result

    def _elapsed_s(self) -> float:
        return self._earlier_s + time.monotonic() - self._started

    def _measured(self, span: Span) -> None:
        self._spans.setdefault(span.step, []).append(span)
        self._ray.stage(span.stage, span.pool, span.seconds)

    def _stage_seconds(self, step: int) -> dict[str, float]:
        spans = [span for of_step, held in self._spans.items() if of_step <= step for span in held]
        return {
            stage: length((span.start_s, span.end_s) for span in spans if span.stage == stage)
            for stage in sorted({span.stage for span in spans})
        }
