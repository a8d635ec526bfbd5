"""The small model that recipes name `tiny:moe` or `tiny:dense`: made on first use, kept in the user's cache folder."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rl_actors.paths import cache_path


def cached_tiny_model(arch: Literal["moe", "dense"]) -> Path:
    """Folder of the model, with train.jsonl and eval.jsonl; takes up to two minutes the first time."""
    from jobs.make_tiny_model import TinyModelSettings, make_tiny_model

    folder = cache_path() / f"tiny-{arch}"
    make_tiny_model(folder, TinyModelSettings(arch=arch))
    return folder
