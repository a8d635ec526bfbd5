"""Train a model of about one million parameters, with its own data, for the quickstart and the tests.

    python -m jobs.make_tiny_model --arch moe --out models/tiny-moe

The folder holds a Hugging Face model (config.json, model.safetensors, tokenizer.json, ...) and the prompts for RL:
train.jsonl and eval.jsonl, which share no question with each other or with the base model's training.
The folder is either whole or absent, and a second call with the same settings returns at once.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from jobs.tiny_model.task import TaskSettings, entries, unique_rows
from rl_actors.errors import ConfigError, RLActorsError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

SETTINGS_FILE = "tiny_model.json"
TOKENIZER_QUESTIONS = 2000


@dataclass(frozen=True)
class TinyModelSettings:
    """Everything the model depends on; another value is another model."""

    arch: str = "moe"
    seed: int = 0
    hidden: int = 128
    layers: int = 2
    steps: int = 900
    batch: int = 128
    threads: int = 2
    train_prompts: int = 2048
    eval_prompts: int = 512
    task: TaskSettings = field(default_factory=TaskSettings)
    recipe: int = 1
    """Raised when the code changes so that the same settings give another model."""

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def make_tiny_model(out: str | Path, settings: TinyModelSettings, progress: bool = True) -> dict[str, Any]:
    """Make the model in folder `out` unless it is there already; returns its report (accuracies, sizes, seconds).

    Raises:
        ConfigError: `out` holds something that is not a tiny model.
    """
    out = Path(out)
    if (report := _cached(out, settings)) is not None:
        return report
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        report = _build(scratch, settings, progress)
        if out.exists():
            shutil.rmtree(out)
        scratch.chmod(0o755)
        os.rename(scratch, out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return report


def _cached(out: Path, settings: TinyModelSettings) -> dict[str, Any] | None:
    """The report of the model in `out` if its settings are these; None if it has to be made."""
    if not out.exists():
        return None
    try:
        saved = json.loads((out / SETTINGS_FILE).read_text())
    except (OSError, ValueError):
        saved = None
    if not isinstance(saved, dict) or "fingerprint" not in saved:
        if out.is_dir() and not any(out.iterdir()):
            return None
        raise ConfigError(
            f"{out} exists and is not a tiny model made by this command: choose another --out or remove it"
        )
    return saved["report"] if saved["fingerprint"] == settings.fingerprint else None


def _build(folder: Path, settings: TinyModelSettings, progress: bool) -> dict[str, Any]:
    # Imported late: a cached model is found without waiting for torch.
    import torch
    from transformers.utils.logging import disable_progress_bar

    from jobs.tiny_model.architecture import MAX_POSITIONS, make_config
    from jobs.tiny_model.evaluation import accuracy
    from jobs.tiny_model.tokenizer import make_tokenizer
    from jobs.tiny_model.training import TrainingSettings, train

    disable_progress_bar()
    started, threads = time.monotonic(), torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        questions = [
            entry["question"] for entry in itertools.islice(entries(settings.task, "sft", 0), TOKENIZER_QUESTIONS)
        ]
        tokenizer = make_tokenizer(questions, MAX_POSITIONS)
        config = make_config(settings.arch, tokenizer, settings.hidden, settings.layers)
        training = TrainingSettings(steps=settings.steps, batch=settings.batch)
        model = train(config, tokenizer, settings.task, training, settings.seed, progress)
        held_out = unique_rows(settings.task, "eval", settings.seed, settings.eval_prompts)
        report = {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "accuracy_greedy": accuracy(model, tokenizer, held_out, temperature=0.0),
            "accuracy_sampled": accuracy(model, tokenizer, held_out, temperature=1.0),
        }
    finally:
        torch.set_num_threads(threads)
    _save(folder, model, tokenizer)
    _write_jsonl(folder / "train.jsonl", unique_rows(settings.task, "train", settings.seed, settings.train_prompts))
    _write_jsonl(folder / "eval.jsonl", held_out)
    report["seconds"] = round(time.monotonic() - started, 1)
    saved = {"fingerprint": settings.fingerprint, "settings": asdict(settings), "report": report}
    (folder / SETTINGS_FILE).write_text(json.dumps(saved, indent=2) + "\n")
    return report


def _save(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Hugging Face format, with the expert count under the name that released Qwen3-MoE models use."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


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
    parser = argparse.ArgumentParser(prog="python -m jobs.make_tiny_model", description=__doc__.split("\n\n")[0])
    parser.add_argument("--arch", choices=("moe", "dense"), default="moe")
    parser.add_argument("--out", required=True, help="folder of the model; replaced if it holds another tiny model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--steps", type=int, default=TinyModelSettings.steps, help="training steps; fewer is a worse model"
    )
    options = parser.parse_args(arguments)
    settings = TinyModelSettings(arch=options.arch, seed=options.seed, steps=options.steps)
    out = Path(options.out)
    try:
        cached = _cached(out, settings) is not None
        report = make_tiny_model(out, settings)
    except RLActorsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _print_report(out, settings, report, cached)
    return 0


if __name__ == "__main__":
    sys.exit(main())
