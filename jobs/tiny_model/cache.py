"""The small model that recipes name `tiny:moe` or `tiny:dense`: made on first use, kept in the user's cache folder."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from jobs.tiny_model.settings import Arch, TinyModelSettings
from rl_actors.errors import ConfigError
from rl_actors.paths import cache_path


def cached_tiny_model(arch: str) -> Path:
    """Folder of the model, with train.jsonl and eval.jsonl; takes up to two minutes the first time.

    Raises:
        ConfigError: there is no small model of that name.
    """
    from jobs.make_tiny_model import make_tiny_model

    for known in get_args(Arch):
        if arch == known:
            folder = cache_path() / f"tiny-{arch}"
            make_tiny_model(folder, TinyModelSettings(arch=known))
            return folder
    raise ConfigError(f"tiny:{arch} names no small model: use {' or '.join(f'tiny:{name}' for name in get_args(Arch))}")
