"""Train a model of about one million parameters, with its own data, for the quickstart and the tests.

    python -m jobs.make_tiny_model --arch moe --out models/tiny-moe

The folder holds a Hugging Face model (config.json, model.safetensors, tokenizer.json, ...) and the prompts for RL:
train.jsonl and eval.jsonl, which share no question with each other or with the base model's training.
The folder is either whole or absent, and a second call with the same settings returns at once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jobs.cli import count, positive
from jobs.tiny_model.settings import SETTINGS_FILE, TinyModelSettings, TrainingSettings
from rl_actors.errors import ConfigError, RLActorsError
from rl_actors.json_object import json_object
from rl_actors.paths import writable_folder


def make_tiny_model(out: str | Path, settings: TinyModelSettings, progress: bool = True) -> dict[str, Any]:
    """Make the model in folder `out` unless it is there already.

    Returns:
        Its report: parameters, accuracy_greedy, accuracy_sampled (temperature 1), seconds, cpu_seconds.

    Raises:
        ConfigError: `out` holds something that this command did not make.
        RuntimeError: training failed; its own error is on stderr.
    """
    out = Path(out)
    if (report := find_tiny_model(out, settings)) is not None:
        return report
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        _build(scratch, settings, progress)
        _put_in_place(scratch, out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if (report := find_tiny_model(out, settings)) is None:
        raise RuntimeError(f"{out} was replaced by another process meanwhile: run the command again")
    return report


def find_tiny_model(out: Path, settings: TinyModelSettings) -> dict[str, Any] | None:
    """The report of the model in `out` if its settings are these; None if it has to be made.

    Raises:
        ConfigError: `out` holds something that this command did not make.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    try:
        saved = json_object((out / SETTINGS_FILE).read_bytes())
        fingerprint, report = saved["fingerprint"], saved["report"]
    except (OSError, ValueError, KeyError):
        raise ConfigError(f"{out} was not made by this command: choose another --out, or remove it") from None
    return dict(report) if fingerprint == settings.fingerprint else None


def _build(folder: Path, settings: TinyModelSettings, progress: bool) -> None:
    root = str(Path(__file__).resolve().parents[1])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
        # Threads that spin while they wait slow each other down by ten times on a machine with other work.
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": str(settings.training.threads),
    }
    command = [sys.executable, "-m", "jobs.tiny_model.build", str(folder), settings.to_json()]
    done = subprocess.run(command + ([] if progress else ["--quiet"]), env=environment, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"training the tiny model failed with exit code {done.returncode}")


def _put_in_place(scratch: Path, out: Path) -> None:
    scratch.chmod(0o755)
    if out.exists():
        shutil.rmtree(out)
    try:
        scratch.rename(out)
    except OSError:
        # Another process was first. Same settings make the same model, and other settings are told by the caller.
        if not out.is_dir():
            raise


def _print_report(out: Path, settings: TinyModelSettings, report: dict[str, Any], cached: bool) -> None:
    table = Table(title=f"tiny {settings.arch} model in {out}" + (" (made before)" if cached else ""))
    for column in ("parameters", "held-out accuracy, greedy", "at temperature 1", "seconds to make"):
        table.add_column(column, justify="right")
    table.add_row(
        f"{report['parameters']:,}",
        f"{report['accuracy_greedy']:.3f}",
        f"{report['accuracy_sampled']:.3f}",
        f"{report['seconds']:.0f}",
    )
    Console().print(table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jobs.make_tiny_model", description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--arch", choices=("moe", "dense"), default="moe")
    parser.add_argument("--out", required=True, help="folder of the model; another tiny model there is replaced")
    parser.add_argument("--seed", type=count, default=0)
    parser.add_argument("--steps", type=positive, default=TrainingSettings.steps, help="training steps")
    options = parser.parse_args(arguments)
    training = replace(TrainingSettings(), steps=options.steps)
    settings = TinyModelSettings(arch=options.arch, seed=options.seed, training=training)
    out = Path(options.out)
    try:
        writable_folder(out, "--out")
        cached = find_tiny_model(out, settings) is not None
        report = make_tiny_model(out, settings)
    except RLActorsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _print_report(out, settings, report, cached)
    return 0


if __name__ == "__main__":
    sys.exit(main())
