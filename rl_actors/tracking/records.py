"""The numbers of one training step, and RUN_DIR/metrics.jsonl, which holds them.

Invariant: the file is a sequence of whole JSON lines, each written in one call. A line torn by a kill can only be the
last one; the reader leaves it out and the next writer cuts it off. After a resume from step k no line speaks of a
step behind k, so every step stands once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pydantic import TypeAdapter

from rl_actors.errors import ConfigError
from rl_actors.json_object import json_object, reason

if TYPE_CHECKING:
    import pandas as pd

STAGES = ("rollout_wait", "reward", "sleep", "logprob", "ref_logprob", "update", "wake", "sync", "checkpoint")
"""The stages of a step, in the order of the pipeline. `rollout_wait` is what the driver waits for a full batch;
`checkpoint` is what the step waits for a save. The write itself, `checkpoint_write`, goes on beside later steps."""

NAN = math.nan
METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One training step. Means are over the batch that was trained; what a run does not have stays NaN or empty.

    Attributes:
        step: 1 for the first; step n follows n - 1 earlier ones, resumed or not.
        version: weight version that the step published.
        reward_mean, reward_std: over all scored trajectories, those of dropped groups included.
        uniform_fraction: share of the groups whose samples all got the same reward.
        loss, grad_norm, lr, entropy: of the update; entropy in nats per token.
        kl: nats per token to the reference; NaN when KL is off.
        tis: truncated importance sampling, such as "mean", "max", "capped_fraction".
        response_length_mean, response_length_max: sampled tokens per trajectory.
        truncated_fraction: share of trajectories that ended by length.
        staleness_mean, staleness_max: versions between the trainer and the oldest token of a trajectory.
        dropped_stale: trajectories left out in this step because they were too old.
        seconds: wall seconds of each stage by name (see `STAGES`). Left empty, the tracker fills it from its spans.
        step_s: wall seconds from the end of the last step to the end of this one. 0 lets the tracker measure it.
        sync_bytes: bytes sent to all engines together.
        tokens_trained: prompt and response tokens of the batch.
        buffer_depth: groups that were ready and not yet trained when the step ended.
        engine: of the rollout pool, such as "running", "waiting", "kv_cache_usage", "tokens_per_s".
        extra: everything else worth a curve, by name.
        elapsed_s: seconds that the run has been running, earlier attempts included; the tracker fills it.
    """

    step: int
    version: int
    reward_mean: float
    reward_std: float = NAN
    uniform_fraction: float = NAN
    loss: float = NAN
    grad_norm: float = NAN
    lr: float = NAN
    entropy: float = NAN
    kl: float = NAN
    tis: Mapping[str, float] = field(default_factory=dict)
    response_length_mean: float = NAN
    response_length_max: int = 0
    truncated_fraction: float = NAN
    staleness_mean: float = NAN
    staleness_max: int = 0
    dropped_stale: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    step_s: float = 0.0
    sync_bytes: int = 0
    tokens_trained: int = 0
    buffer_depth: int = 0
    engine: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, float] = field(default_factory=dict)
    elapsed_s: float = 0.0

    @property
    def sync_s(self) -> float:
        """Wall seconds of the sync stage; NaN if the step had none."""
        return self.seconds.get("sync", NAN)

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per wall second of the step; NaN if the step's duration is not known."""
        return self.tokens_trained / self.step_s if self.step_s > 0 else NAN

    def flat(self) -> dict[str, float]:
        """All numbers by one name each; those of a mapping are called "seconds/update" and so on."""
        numbers: dict[str, float] = {}
        for name, value in asdict(self).items():
            if isinstance(value, Mapping):
                numbers |= {f"{name}/{key}": number for key, number in value.items()}
            else:
                numbers[name] = value
        return numbers | {"tokens_per_s": self.tokens_per_s}


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRecord:
    """Mean reward on the held-out prompts after `step` training steps; step 0 is the untrained model."""

    step: int
    value: float
    elapsed_s: float = 0.0


@dataclass(frozen=True)
class RunMetrics:
    """All of a run's metrics.jsonl, in order of steps."""

    steps: list[StepRecord]
    evals: list[EvalRecord]

    def frame(self) -> pd.DataFrame:
        """One row per step, one column per name of `StepRecord.flat`."""
        import pandas as pd

        return pd.DataFrame([record.flat() for record in self.steps])

    def eval_frame(self) -> pd.DataFrame:
        """One row per evaluation: step, value, elapsed_s."""
        import pandas as pd

        return pd.DataFrame([asdict(record) for record in self.evals], columns=[f.name for f in fields(EvalRecord)])


def read_metrics(run_dir: str | Path) -> RunMetrics:
    """Read RUN_DIR/metrics.jsonl; a step or evaluation that stands twice counts as it stands last.

    Raises:
        FileNotFoundError: the run folder has no metrics.jsonl.
        ConfigError: a line other than a torn last one is no record.
    """
    path = Path(run_dir) / METRICS_FILE
    steps: dict[int, StepRecord] = {}
    evals: dict[int, EvalRecord] = {}
    for number, line in _whole_lines(path):
        try:
            if line["kind"] == "step":
                steps[line["step"]] = _STEP.validate_python(_known(StepRecord, line))
            elif line["kind"] == "eval":
                evals[line["step"]] = _EVAL.validate_python(_known(EvalRecord, line))
        except ValueError as error:
            raise bad_line(path, number, error) from error
    return RunMetrics([steps[step] for step in sorted(steps)], [evals[step] for step in sorted(evals)])


_STEP, _EVAL = TypeAdapter(StepRecord), TypeAdapter(EvalRecord)


def bad_line(path: Path, number: int, error: Exception) -> ConfigError:
    """What readers of a run's files raise where a line is not what was written there."""
    what = f"is not what a run writes there ({reason(error)})"
    return ConfigError(f"{path}, line {number} {what}: remove it to read the rest")


class MetricsWriter:
    """Appends records to RUN_DIR/metrics.jsonl.

    Args:
        run_dir: must exist.
        resume_step: the last step that counts; later lines are cut. None starts a new file and keeps an old one as
            metrics.previous.jsonl.
    """

    def __init__(self, run_dir: Path, resume_step: int | None = None) -> None:
        path = run_dir / METRICS_FILE
        if path.exists():
            if resume_step is None:
                path.replace(path.with_suffix(".previous.jsonl"))
            else:
                _cut(path, resume_step)
        # Unbuffered: one record is one write call, so a kill leaves at most one torn line, the last.
        self._file = path.open("ab", buffering=0)

    def write(self, record: StepRecord | EvalRecord) -> None:
        kind = "step" if isinstance(record, StepRecord) else "eval"
        self._file.write(_line({"kind": kind, **asdict(record)}))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def plain(value: Any) -> Any:
    """`value` with numpy scalars as Python numbers and what JSON cannot say (NaN, infinity) as None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(tree: Mapping[str, Any]) -> bytes:
    return json.dumps(plain(tree), allow_nan=False).encode() + b"\n"


def _whole_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and content of each line; all have a kind and a step."""
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            return
        try:
            tree = json_object(line)
            if type(tree.get("step")) is not int or "kind" not in tree:
                raise ValueError("it has no step or no kind")
        except ValueError as error:
            raise bad_line(path, number, error) from error
        yield number, tree


def _cut(path: Path, last_step: int) -> None:
    """Drop the lines behind `last_step` and a torn last one; the file is replaced whole."""
    kept = [_line(line) for _, line in _whole_lines(path) if line["step"] <= last_step]
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(b"".join(kept))
    temporary.replace(path)


def _known(record: type[StepRecord] | type[EvalRecord], line: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `line` that `record` has; null is NaN again."""
    values = {f.name: line[f.name] for f in fields(record) if f.name in line}
    for name, value in values.items():
        if isinstance(value, dict):
            values[name] = {key: NAN if number is None else number for key, number in value.items()}
        elif value is None:
            values[name] = NAN
    return values
