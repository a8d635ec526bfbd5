"""What all jobs share: reading the command line, exit codes, and the connection to Ray.

Exit codes: 0 done, 1 a run or a check failed, 2 bad input (nothing was started).
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
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


def positive(text: str) -> int:
    """Type of a command line's count."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


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
    import ray

    if not (Path.home() / ".ray" / "auth_token").exists():
        # Ray 2.60 would write a token here, and from then on refuse `ray job submit` without RAY_AUTH_MODE=token. A
        # machine that has one keeps using it.
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    try:
        context: Any = ray.init(logging_level=logging.WARNING, ignore_reinit_error=True)
    except ConnectionError as error:
        if address := os.environ.get("RAY_ADDRESS"):
            raise RLActorsError(f"the Ray cluster at RAY_ADDRESS={address} does not answer: {error}") from error
        print("the Ray cluster that ran on this machine does not answer: starting another one here", file=sys.stderr)
        context = ray.init(address="local", logging_level=logging.WARNING)
    return f"http://{context.dashboard_url}" if context.dashboard_url else None


def disconnect() -> None:
    """Leave the cluster, after the log lines of its actors have come."""
    import ray

    ray.shutdown()
