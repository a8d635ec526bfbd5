"""Read the rows of a dataset, whatever form it has, as plain dictionaries.

Invariant: every fault is one ConfigError that says what is wrong, where, and what to write instead.
Forms: a `.json` file (a list of objects), `.jsonl`, `.parquet`, a folder written by `datasets.save_to_disk`, or a
dataset on the Hugging Face hub (`owner/name`, or `owner/name:config` for one configuration of it).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_actors.errors import ConfigError
from rl_actors.paths import given_path

Row = dict[str, Any]
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
_CONNECT_TIMEOUT_S = 5.0
_SUFFIXES = (".json", ".jsonl", ".parquet")


def read_rows(source: str, split: str, setting: str = "data.train") -> list[Row]:
    """All rows of `source`, in order.

    Args:
        source: one of the forms above.
        split: which split of a hub dataset, or of a folder that holds several.
        setting: the configuration key that named `source`, for messages.

    Raises:
        ConfigError: the dataset is missing, empty, or cannot be read.
    """
    path = given_path(source)
    if path.is_dir():
        rows = _read_folder(path, split, setting)
    elif path.is_file():
        rows = _read_file(path, setting)
    elif _looks_like_a_file(source):
        raise ConfigError(f"{setting} {source} does not exist: {_what_to_give(path)}")
    else:
        rows = _read_hub(source, split, setting)
    if not rows:
        raise ConfigError(f"{setting} {source} has no rows")
    return rows


def _read_file(path: Path, setting: str) -> list[Row]:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _read_parquet(path, setting)
    if suffix not in (".json", ".jsonl"):
        raise ConfigError(f"{setting} {path} is not a .json, .jsonl or .parquet file: rename or convert it")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{setting} {path} is not UTF-8 text (byte {error.start}): convert it to UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{setting} {path} cannot be read: {error.strerror}") from error
    return _parse_lines(text, path, setting) if suffix == ".jsonl" else _parse_document(text, path, setting)


def _parse_lines(text: str, path: Path, setting: str) -> list[Row]:
    rows = []
    # Not splitlines(): JSON strings may hold other line separators, such as U+2028.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{setting} {path}: line {number} is not valid JSON ({error.msg}, column {error.colno})"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{setting} {path}: line {number} cannot be used ({_json_limit(error)})") from error
        rows.append(_as_row(row, f"{setting} {path}: line {number}"))
    return rows


def _parse_document(text: str, path: Path, setting: str) -> list[Row]:
    if not text.strip():
        return []
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        hint = "; one object a line is .jsonl: rename the file" if error.msg == "Extra data" else ""
        raise ConfigError(f"{setting} {path}: line {error.lineno} is not valid JSON ({error.msg}){hint}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{setting} {path} cannot be used ({_json_limit(error)})") from error
    if not isinstance(document, list):
        raise ConfigError(
            f"{setting} {path} holds a {type(document).__name__}: write a list of objects, one for each row"
        )
    return [_as_row(row, f"{setting} {path}: row {number}") for number, row in enumerate(document, start=1)]


def _json_limit(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"


def _as_row(value: Any, where: str) -> Row:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} holds a {type(value).__name__}: write an object with the columns of one row")
    return dict(value)


def _read_parquet(path: Path, setting: str) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{setting} {path} is not a readable parquet file: {_one_line(error)}") from error
    return rows


def _read_folder(path: Path, split: str, setting: str) -> list[Row]:
    # Importing the library takes long, so a folder that cannot be a dataset is refused without it.
    if not any((path / name).is_file() for name in ("state.json", "dataset_info.json", "dataset_dict.json")):
        raise ConfigError(_not_a_dataset(path, setting))
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # the library raises many types for a folder that is not a dataset
        raise ConfigError(_not_a_dataset(path, setting)) from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise ConfigError(f"{setting} {path} has no split {split!r}; its splits are {', '.join(sorted(loaded))}")
        loaded = loaded[split]
    return [dict(row) for row in loaded]


def _not_a_dataset(path: Path, setting: str) -> str:
    inside = (
        sorted(item.name for item in path.iterdir() if item.suffix in _SUFFIXES) if os.access(path, os.R_OK) else []
    )
    hint = f"give one of its files, such as {inside[0]}" if inside else "give a folder that save_to_disk wrote"
    return f"{setting} {path} is a folder but not a saved dataset: {hint}"


def _read_hub(name: str, split: str, setting: str) -> list[Row]:
    import datasets

    repository, _, configuration = name.partition(":")
    with _offline() if _hub_is_out_of_reach() else contextlib.nullcontext():
        try:
            loaded = datasets.load_dataset(repository, configuration or None, split=split)
        except Exception as error:  # network, access, unknown name or split: each has its own type
            raise ConfigError(
                f"{setting} {name} is not a file here and could not be loaded from the Hugging Face hub "
                f"(split {split!r}): {_one_line(error)}"
            ) from error
    return [dict(row) for row in loaded]


def _hub_is_out_of_reach() -> bool:
    """Whether the hub cannot be connected to directly. Behind a proxy only a request could tell."""
    from huggingface_hub import constants

    if urllib.request.getproxies():
        return False
    hub = urllib.parse.urlsplit(constants.ENDPOINT)
    try:
        with socket.create_connection((hub.hostname, hub.port or 443), timeout=_CONNECT_TIMEOUT_S):
            return False
    except OSError:
        return True


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Only what was downloaded before is used, without waiting.

    huggingface_hub 1.33 repeats a failed request for half a minute, and reads its environment variable for offline use
    at import only. This can go when the number of attempts is an argument of datasets.load_dataset.
    """
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _looks_like_a_file(source: str) -> bool:
    """Whether a source that does not exist was meant as a path, not as a dataset on the hub."""
    path = Path(source)
    if path.suffix.lower() in _SUFFIXES or source.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(source):
        return True
    return len(path.parts) > 1 and path.parent.is_dir()


def _what_to_give(path: Path) -> str:
    near = (
        sorted(item.name for item in path.parent.glob("*") if item.suffix in _SUFFIXES) if path.parent.is_dir() else []
    )
    if near:
        return f"in {path.parent} there is {', '.join(near[:5])}"
    return "give a .json, .jsonl or .parquet file, a saved dataset's folder, or a dataset's name on the hub"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
