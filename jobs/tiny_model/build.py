"""Train a tiny model into a folder: `python -m jobs.tiny_model.build FOLDER SETTINGS_JSON`, run by make_tiny_model.

It is a process of its own so that the model depends on its settings only, not on what the caller did to torch.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from jobs.data import write_jsonl
from jobs.tiny_model.architecture import MAX_POSITIONS, make_config
from jobs.tiny_model.evaluation import accuracy
from jobs.tiny_model.settings import SETTINGS_FILE, TinyModelSettings
from jobs.tiny_model.task import entries, unique_rows
from jobs.tiny_model.tokenizer import make_tokenizer
from jobs.tiny_model.training import train

TOKENIZER_QUESTIONS = 2000


def build(folder: Path, settings: TinyModelSettings, progress: bool = True) -> None:
    """Write model, tokenizer, prompts, and last the settings file with the report."""
    started = time.monotonic()
    torch.set_num_threads(settings.training.threads)
    sample = itertools.islice(entries(settings.task, "sft", seed=0), TOKENIZER_QUESTIONS)
    tokenizer = make_tokenizer([entry["question"] for entry in sample], MAX_POSITIONS)
    config = make_config(settings.arch, tokenizer, settings.hidden, settings.layers)
    model = train(config, tokenizer, settings.task, settings.training, settings.seed, progress)
    held_out = unique_rows(settings.task, "eval", settings.seed, settings.eval_prompts)
    report: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "accuracy_greedy": accuracy(model, tokenizer, held_out, temperature=0.0),
        "accuracy_sampled": accuracy(model, tokenizer, held_out, temperature=1.0),
    }
    _save(folder, model, tokenizer)
    write_jsonl(folder / "train.jsonl", unique_rows(settings.task, "train", settings.seed, settings.train_prompts))
    write_jsonl(folder / "eval.jsonl", held_out)
    report["seconds"] = round(time.monotonic() - started, 1)
    report["cpu_seconds"] = round(time.process_time(), 1)
    saved = {"fingerprint": settings.fingerprint, "report": report, "settings": asdict(settings)}
    (folder / SETTINGS_FILE).write_text(json.dumps(saved, indent=2) + "\n")


def _save(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Hugging Face format, with the expert count under the name that released Qwen3-MoE models use."""
    disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    build(Path(sys.argv[1]), TinyModelSettings.from_json(sys.argv[2]), progress="--quiet" not in sys.argv)
