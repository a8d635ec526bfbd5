"""What all jobs share: reading the command line, exit codes, and the connection to Ray.

Exit codes: 0 done, 1 a run or a check failed, 2 bad input (nothing was started).
"""

from __future__ import annotations

import argparse
import functools
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from rl_actors.config import RunConfig
from rl_actors.config_file import load_config
from rl_actors.errors import ConfigError, PlacementError, RLActorsError

TINY, SHAPE = "tiny:", "shape:"


def run(main: Callable[[], int]) -> NoReturn:
    """Run a job's `main` and leave with its exit code; errors of this project become one sentence."""
    try:
        code = main()
    except (ConfigError, PlacementError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except RLActorsError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    sys.stderr.flush()
    raise SystemExit(code)


def recipe_parser(description: str) -> argparse.ArgumentParser:
    """A parser that takes a recipe and overrides of it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="recipe, such as jobs/configs/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", help="section.key=value, such as trainer.ep=2")
    return parser


def count(text: str, least: int = 0) -> int:
    """Type of a command line's whole number."""
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number of {least} to {10**9 - 1}")
    return int(text)


def positive(text: str) -> int:
    """Type of a command line's whole number of at least 1."""
    return count(text, least=1)


def gib(text: str) -> float:
    """Type of a command line's amount of memory."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 2**20:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of GiB, such as 80")
    return value


def read_recipe(path: str, overrides: Sequence[str]) -> RunConfig:
    """Read a recipe; what it names `tiny:...` or `shape:...` is made if it is not there yet."""
    config = load_config(path, list(overrides))
    data = config.data.model_copy(
        update={name: local_folder(value) for name in ("train", "eval") if (value := getattr(config.data, name))}
    )
    model = config.model.model_copy(update={"path": local_folder(config.model.path)})
    return config.model_copy(update={"model": model, "data": data})


def local_folder(path: str) -> str:
    """`path`, or the folder of what `tiny:...` or `shape:...` names, made if it is not there yet."""
    if path.startswith(SHAPE):
        from jobs.make_shape import cached_shape

        return str(cached_shape(path.removeprefix(SHAPE)))
    if not path.startswith(TINY):
        return path
    from jobs.tiny_model.cache import cached_tiny_model

    arch, _, rest = path.removeprefix(TINY).partition("/")
    folder = cached_tiny_model(arch)
    return str(folder / rest if rest else folder)


def connect() -> str | None:
    """Join the Ray cluster of this job or machine, or start one here. Returns the dashboard's address."""
    if not (Path.home() / ".ray" / "auth_token").exists():
        # Ray 2.60 would write a token here, and from then on refuse `ray job submit` without RAY_AUTH_MODE=token. A
        # machine that has one keeps using it.
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    with _agent_on_a_free_port():
        try:
            context = _init(ignore_reinit_error=True)
        except ConnectionError as error:
            if address := os.environ.get("RAY_ADDRESS"):
                raise RLActorsError(f"the Ray cluster at RAY_ADDRESS={address} does not answer: {error}") from error
            print(
                "the Ray cluster that ran on this machine does not answer: starting another one here", file=sys.stderr
            )
            context = _init(address="local")
    return f"http://{context.dashboard_url}" if context.dashboard_url else None


def _init(**arguments: Any) -> Any:
    import ray

    try:
        return ray.init(logging_level=logging.WARNING, **arguments)
    except ConnectionError:
        raise
    except Exception as error:  # Ray raises nothing narrower
        if "timed out during startup" not in str(error):
            raise
        raise RLActorsError(
            "Ray did not start in time, as on a machine that is busy with other work: try again, or start it first "
            "with `ray start --head` (logs: /tmp/ray/session_latest/logs)"
        ) from error


@contextmanager
def _agent_on_a_free_port() -> Iterator[None]:
    """Lets a second cluster start on this machine with an agent, which is what takes jobs.

    Ray 2.60 puts the agent of every cluster that `ray.init` starts on port 52365, and where that is taken the cluster
    has none. This can go when `ray.init` takes `dashboard_agent_listen_port`, as `ray start` does.
    """
    from ray._private import parameter

    parameters: Any = parameter.RayParams
    parameter.RayParams = functools.partial(parameters, dashboard_agent_listen_port=0)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        parameter.RayParams = parameters  # type: ignore[misc]


def disconnect() -> None:
    """Leave the cluster, after the log lines of its actors have come."""
    import ray

    ray.shutdown()
