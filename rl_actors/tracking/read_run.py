"""A run's folder as its readers take it: a running, a killed or a copied one, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rl_actors.errors import ConfigError
from rl_actors.tracking.records import RunMetrics, read_metrics
from rl_actors.tracking.trace import Span, read_trace


def read_run(run_dir: Path) -> tuple[RunMetrics, list[Span]]:
    """RUN_DIR/metrics.jsonl and RUN_DIR/trace.json.

    Raises:
        ConfigError: it is not the folder of a run, or what it holds is damaged.
    """
    return of_run(run_dir, lambda: (read_metrics(run_dir), read_trace(run_dir)))


def of_run[T](run_dir: Path, read: Callable[[], T]) -> T:
    """`read()`; where a file of the run is missing, the error says that it is no run's folder."""
    try:
        return read()
    except OSError as error:
        name = Path(error.filename or "").name
        if not run_dir.exists():
            reason = "there is nothing"
        elif not run_dir.is_dir():
            reason = "it is a file"
        elif isinstance(error, FileNotFoundError):
            reason = f"it has no {name}"
        else:
            reason = f"{name} cannot be read: {error.strerror}"
        raise ConfigError(f"{run_dir} is not the folder of a run, such as runs/quickstart: {reason}") from error
