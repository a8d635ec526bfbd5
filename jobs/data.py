"""Write datasets in the columns that the recipes read: train.jsonl and test.jsonl with question and answer.

python -m jobs.data gsm8k --out data/gsm8k
python -m jobs.data gsm8k --out data/gsm8k --train-jsonl train.jsonl --test-jsonl test.jsonl
python -m jobs.data reasoning_gym --task chain_sum --out data/chain_sum --set max_terms=4 max_digits=2
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from jobs.cli import count, positive
from rl_actors.data.rows import Row, read_rows
from rl_actors.errors import ConfigError, RLActorsError
from rl_actors.paths import writable_folder

GSM8K = "openai/gsm8k:main"
# reasoning-gym derives entry i from `seed + i`: seeds must lie further apart than a dataset is long.
_SEED_STRIDE = 10_000_000


def write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    """Write rows, one JSON object a line; the file appears when it is whole.

    Raises:
        ConfigError: it cannot be written there.
    """
    scratch = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def gsm8k_rows(split: str, source: str | None) -> list[Row]:
    """One split of GSM8K, from a local file or from the Hugging Face hub.

    Raises:
        ConfigError: the source cannot be read, or its rows are not GSM8K's.
    """
    option = f"--{split}-jsonl"
    rows = read_rows(source or GSM8K, split, option if source else "dataset")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row.get("question"), str) or "####" not in str(row.get("answer")):
            raise ConfigError(
                f"{source or GSM8K}: row {number} is not a GSM8K row: it needs a question, and an answer with '#### '"
            )
    return [
        {"id": f"gsm8k-{split}-{number}", "question": row["question"], "answer": row["answer"]}
        for number, row in enumerate(rows)
    ]


def reasoning_gym_rows(
    task: str, settings: dict[str, Any], seed: int, train: int, test: int
) -> tuple[list[Row], list[Row]]:
    """Different entries of a reasoning-gym task; no question is in both parts.

    Args:
        settings: of the task, such as `max_terms`.
        train, test: how many entries.

    Raises:
        ConfigError: an unknown task or setting, or fewer different questions than asked for.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3)
        raise ConfigError(
            f"reasoning-gym has no task {task!r}" + (f": did you mean {', '.join(near)}?" if near else "")
        )
    wanted = train + test
    try:
        dataset = reasoning_gym.create_dataset(task, seed=seed * _SEED_STRIDE, size=20 * wanted, **settings)
    except (TypeError, AssertionError, ValueError) as error:
        raise ConfigError(f"task {task} does not take these settings: {error}") from error
    unique: dict[str, Row] = {}
    for entry in dataset:
        unique.setdefault(entry["question"], entry)
        if len(unique) == wanted:
            break
    else:
        raise ConfigError(
            f"task {task} gave only {len(unique)} different questions, not {wanted}: lower --train and --test, "
            "or make the task larger with --set"
        )
    rows = [{"id": f"{task}-{number}", **entry} for number, entry in enumerate(unique.values())]
    return rows[test:], rows[:test]


def _parse_settings(pairs: list[str]) -> dict[str, Any]:
    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set {pair!r} is not of the form name=value, such as max_terms=4")
        try:
            settings[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {pair!r}: the value is not valid YAML: {' '.join(str(error).split())}") from error
    return settings


def _write(out: Path, train: list[Row], test: list[Row]) -> None:
    table = Table()
    for column in ("file", "rows"):
        table.add_column(column, justify="right" if column == "rows" else "left")
    for name, rows in (("train.jsonl", train), ("test.jsonl", test)):
        write_jsonl(out / name, rows)
        table.add_row(str(out / name), f"{len(rows):,}")
    Console().print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jobs.data", description=str(__doc__).split("\n\n")[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    gsm8k = kinds.add_parser("gsm8k", help="GSM8K from the Hugging Face hub, or from local files in its format")
    gsm8k.add_argument("--train-jsonl", help="local file instead of the hub")
    gsm8k.add_argument("--test-jsonl", help="local file instead of the hub")
    gym = kinds.add_parser("reasoning_gym", help="entries of a reasoning-gym task")
    gym.add_argument("--task", required=True)
    gym.add_argument("--train", type=positive, default=4096, help="number of training entries")
    gym.add_argument("--test", type=count, default=512, help="number of held-out entries")
    gym.add_argument("--seed", type=count, default=0)
    gym.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the task")
    for kind in (gsm8k, gym):
        kind.add_argument("--out", required=True, type=Path, help="folder for train.jsonl and test.jsonl")
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        writable_folder(options.out, "--out")
        if options.kind == "gsm8k":
            train, test = gsm8k_rows("train", options.train_jsonl), gsm8k_rows("test", options.test_jsonl)
        else:
            settings = _parse_settings(options.set)
            train, test = reasoning_gym_rows(options.task, settings, options.seed, options.train, options.test)
        _write(options.out, train, test)
    except RLActorsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
