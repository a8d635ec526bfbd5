"""The run as Prometheus metrics through Ray, for Ray's dashboard and Grafana.

Always on: without a running cluster Ray's metrics are accepted and go nowhere. Names are `rl_actors_*`, tags `run`
and `pool`. Each stage has a histogram `rl_actors_<stage>_seconds` of its spans and a gauge
`rl_actors_<stage>_last_seconds`; each number of a step is a gauge.
"""

from __future__ import annotations

import math
import re

from ray.util.metrics import Gauge, Histogram

from rl_actors.tracking.records import EvalRecord, StepRecord

TAGS = ("run", "pool")

# From a fast CPU stage to a half-hour rollout, in seconds.
BOUNDARIES = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 1800.0]


class RayMetrics:
    """Gauges and histograms of one run, made when first needed. Create it in the process that reports."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}

    def stage(self, stage: str, pool: str, seconds: float) -> None:
        """One span of a stage ended."""
        name = _name(f"{stage}_seconds")
        if name not in self._histograms:
            self._histograms[name] = Histogram(name, f"Seconds of each {stage}", BOUNDARIES, TAGS)
        self._histograms[name].observe(float(seconds), self._tags(pool))
        self._set(f"{stage}_last_seconds", f"Seconds of the last {stage}", seconds, pool)

    def step(self, record: StepRecord) -> None:
        """One training step ended. Numbers that the run does not have (NaN) are left out."""
        for name, value in record.flat().items():
            # The time of a stage is `stage`'s, which knows its pool.
            if not name.startswith("seconds/") and math.isfinite(value):
                self._set(name, f"{name} of the last training step", value, "driver")

    def evaluation(self, record: EvalRecord) -> None:
        if math.isfinite(record.value):
            self._set("eval_reward", "Mean reward on held-out prompts", record.value, "rollout")

    def _set(self, name: str, description: str, value: float, pool: str) -> None:
        name = _name(name)
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, description, TAGS)
        self._gauges[name].set(float(value), self._tags(pool))

    def _tags(self, pool: str) -> dict[str, str]:
        return {"run": self._run, "pool": pool}


def _name(name: str) -> str:
    return "rl_actors_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
