"""From the name of a reward in the configuration to the function.

Invariant: a name that cannot work is a ConfigError on the driver, before anything is started.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_actors.errors import ConfigError

RewardFunction = Callable[..., float | Awaitable[float]]
"""`reward(prompt: Prompt, text: str, **kwargs) -> float`, plain or async. See `rl_actors.rewards`."""

BUILT_IN = {
    "gsm8k": "rl_actors.rewards.gsm8k:reward",
    "length": "rl_actors.rewards.length:reward",
    "math": "rl_actors.rewards.math:reward",
    "reasoning_gym": "rl_actors.rewards.reasoning_gym:reward",
}


def resolve(name: str, kwargs: Mapping[str, Any] | None = None) -> RewardFunction:
    """The reward function of a built-in name or of `module:function`.

    The working directory is importable, as it is in a Ray job.

    Args:
        kwargs: if given, checked against the function's parameters.

    Raises:
        ConfigError: an unknown name, a module that cannot be imported, a missing or uncallable attribute, or
            arguments that the function does not take.
    """
    if name not in BUILT_IN and ":" not in name:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f": did you mean {near[0]!r}?" if near else ": name your own function as module:function"
        raise ConfigError(f"reward.function {name!r} is not one of {', '.join(BUILT_IN)}{hint}")
    module_name, _, attribute = BUILT_IN.get(name, name).partition(":")
    module = _import(name, module_name)
    function = getattr(module, attribute, None)
    if function is None:
        near = difflib.get_close_matches(attribute, _functions(module), n=1)
        hint = f": did you mean {module_name}:{near[0]}?" if near else ""
        raise ConfigError(f"reward.function {name!r}: module {module_name} has no {attribute!r}{hint}")
    if not callable(function):
        raise ConfigError(f"reward.function {name!r}: {attribute} is a {type(function).__name__}, not a function")
    _check_signature(name, function, kwargs)
    return function  # type: ignore[no-any-return]


def _import(name: str, module_name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            near = difflib.get_close_matches(module_name, _modules_here(), n=1)
            hint = f": did you mean {near[0]}?" if near else f" in {Path.cwd()} or among the installed packages"
            raise ConfigError(f"reward.function {name!r}: there is no module {error.name!r}{hint}") from error
        raise ConfigError(
            f"reward.function {name!r}: module {module_name} needs {error.name!r}, which is missing"
        ) from error
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise ConfigError(
            f"reward.function {name!r}: importing {module_name} raised {type(error).__name__}: {one_line(error)}"
        ) from error


def one_line(error: BaseException) -> str:
    """The message of someone else's error in one line, also if writing it fails."""
    try:
        return " ".join(str(error).split())
    except Exception as fault:  # noqa: BLE001 - a __str__ may raise anything, and the error itself must be told
        return f"(its message cannot be read: __str__ raised {type(fault).__name__})"


def _check_signature(name: str, function: Callable[..., Any], kwargs: Mapping[str, Any] | None) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables written in C do not tell
        return
    try:
        signature.bind_partial(None, "")
    except TypeError as error:
        raise ConfigError(f"reward.function {name!r} takes {signature}, not (prompt, text, **kwargs)") from error
    if kwargs is None:
        return
    try:
        signature.bind(None, "", **kwargs)
    except TypeError as error:
        raise ConfigError(f"reward.kwargs do not fit {name!r}, which takes {signature}: {error}") from error


def _functions(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]


def _modules_here() -> Iterable[str]:
    return [path.stem for path in Path.cwd().glob("*.py")] + [
        f"{path.parent.name}.{path.stem}" for path in Path.cwd().glob("*/*.py")
    ]
