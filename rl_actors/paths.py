"""Where relative paths of a configuration lie, also inside a Ray job.

`ray job submit --working-dir .` copies the folder to the cluster and runs the job in that copy, which Ray
deletes later. Inputs are looked for there first; outputs must never land there. Relative paths are therefore
anchored to `RL_ACTORS_HOME` if it is set, else to the current folder, else (in Ray's copy) to ~/rl_actors.
"""

from __future__ import annotations

import os
from pathlib import Path

from rl_actors.errors import ConfigError


def home() -> Path:
    """The folder that relative output paths are relative to."""
    if anchor := os.environ.get("RL_ACTORS_HOME"):
        return Path(anchor).expanduser().resolve()
    current = Path.cwd()
    if "runtime_resources" in current.parts:
        return Path.home() / "rl_actors"
    return current


def output_path(path: str) -> Path:
    """The absolute place of something a run writes."""
    return given_path(str(home() / given_path(path))).resolve()


def input_path(path: str) -> Path:
    """The absolute place of something a run reads: as given from here if it is there, else from `home()`."""
    given = given_path(path)
    return given.resolve() if given.exists() else given_path(str(home() / given)).resolve()


def given_path(path: str) -> Path:
    """The path with ~ written out. There may be nothing there, but there could be.

    Raises:
        ConfigError: the system can have no such path: NUL, a name too long, an unknown user, a loop of links.
    """
    shown = repr(path if len(path) <= 100 else path[:100] + "...")
    try:
        path.encode()
        given = Path(path).expanduser()
        given.stat()
    except (FileNotFoundError, NotADirectoryError):
        return given
    except UnicodeEncodeError as error:
        raise ConfigError(f"path {shown} cannot be used: it is not valid Unicode") from error
    except OSError as error:
        raise ConfigError(f"path {shown} cannot be used: {error.strerror}") from error
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"path {shown} cannot be used: {error}") from error
    return given


def writable_folder(path: Path, what: str) -> Path:
    """`path`, where a folder can be made or written. Nothing is created.

    Raises:
        ConfigError: a file lies there or on the way, or nothing can be written; `what` names the setting.
    """
    given_path(str(path))
    nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not nearest.is_dir():
        below = "is" if nearest == path else f"lies below {nearest}, which is"
        raise ConfigError(f"{what} {path} {below} a file: give a folder, or a name that is free")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{what} {path} cannot be written: {nearest} is not writable, give another folder")
    return path


def cache_path() -> Path:
    """Where things that can be made again are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "rl_actors"
