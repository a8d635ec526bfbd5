"""Train: `python -m jobs.train RECIPE [section.key=value ...]`, usually through `ray job submit`.

Everything that can be known to be wrong is said before a pool starts (exit code 2). A run that was interrupted goes on
from its newest checkpoint when it is started again with the same run_dir.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

from jobs.cli import connect, read_recipe, recipe_parser, run
from rl_actors.config import RunConfig
from rl_actors.driver.run_folder import only_writer
from rl_actors.errors import ActorDiedError, ActorLateError, RLActorsError
from rl_actors.preflight import Prepared, check_model, prepare

logger = logging.getLogger("rl_actors.jobs")


def main() -> int:
    arguments = recipe_parser(__doc__ or "").parse_args()
    from rl_actors.tracking.console import configure_logging

    configure_logging()
    prepared = prepare(read_recipe(arguments.config, arguments.overrides))
    dashboard = connect()
    check_cluster(prepared.config)
    set_old_run_aside(prepared.config)
    logger.info("run folder: %s", prepared.config.run_path)
    train(prepared, dashboard)
    return 0


def set_old_run_aside(config: RunConfig) -> None:
    """With checkpoint.resume=never an earlier run of the same folder is kept under another name.

    Raises:
        ConfigError: that run is still going on.
    """
    folder = config.run_path
    if config.checkpoint.resume == "never" and folder.exists() and any(folder.iterdir()):
        aside = folder.with_name(f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}")
        with only_writer(folder):
            folder.rename(aside)
        logger.info("checkpoint.resume is never: the earlier run is now in %s", aside)


def check_cluster(config: RunConfig) -> None:
    """Refuse, before anything is reserved, what the cluster could never hold. Raises ConfigError, PlacementError."""
    from placement.bundles import cluster_nodes, resolve_device
    from placement.feasibility import check_feasible
    from rl_actors.driver.plan_run import plan_run

    device = resolve_device(config.placement.device)
    # "auto" is only known now, and a CPU cluster allows less.
    placement = config.placement.model_copy(update={"device": device})
    check_model(config.model_copy(update={"placement": placement}))
    check_feasible(plan_run(config, device), cluster_nodes())


def train(prepared: Prepared, dashboard: str | None) -> dict[str, Any]:
    """Run the driver actor and show what it streams; returns the run's summary."""
    from rl_actors.tracking.console import Console
    from rl_actors.tracking.records import EvalRecord, StepRecord
    from rl_actors.tracking.stage_times import stage_times
    from rl_actors.tracking.trace import read_trace

    config = prepared.config
    console = Console(config.pipeline.steps) if config.tracking.console else None
    summary: dict[str, Any] = {}
    for event in stream_events(prepared):
        if isinstance(event, dict):
            summary = event
        if console is None:
            continue
        if isinstance(event, StepRecord):
            console.step(event)
        elif isinstance(event, EvalRecord):
            console.evaluation(event.step, event.value)
        elif isinstance(event, list):
            console.start(event, dashboard)
        else:
            console.finish(summary, stage_times(read_trace(config.run_path)))
    return summary


def stream_events(prepared: Prepared) -> Iterator[Any]:
    """Start the driver actor and yield its events. Errors of its pools keep their type and sentence."""
    import ray
    from ray import exceptions

    from rl_actors.driver.driver import Driver

    config = prepared.config
    remote: Any = ray.remote(num_cpus=0)(Driver)
    named = remote.options(name=f"{config.run_path.name}/driver")
    driver = named.remote(config, ray.put(prepared.train_prompts), ray.put(prepared.eval_prompts))
    events = driver.run.options(num_returns="streaming").remote()
    bound_s = _longest_silence_s(config)
    try:
        while True:
            ready, _ = ray.wait([events], timeout=bound_s)
            if not ready:
                raise ActorLateError(f"the driver actor has said nothing for {bound_s:g} s")
            yield ray.get(next(events), timeout=bound_s)
    except StopIteration:
        return
    except exceptions.RayTaskError as error:
        cause: Any = error
        while isinstance(cause, exceptions.RayTaskError):
            cause = cause.cause
        if isinstance(cause, RLActorsError):
            raise cause from error
        raise
    except exceptions.RayActorError as error:
        raise ActorDiedError(f"the driver actor died: {error}") from error
    finally:
        ray.kill(driver)


def _longest_silence_s(config: RunConfig) -> float:
    """Each stage of a step has its own timeout; between two events all of them may pass, with retries."""
    times = config.timeouts
    return 2 * (times.start_s + times.rollout_s + 4 * times.step_s + 4 * times.sync_s + times.checkpoint_s)


if __name__ == "__main__":
    run(main)
