"""Everything that can be known to be wrong before a pool starts, checked without torch, Ray or a GPU.

Invariant: what passes here fails later only for reasons outside the configuration (machines, memory, time).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from placement.layout import EngineLayout, MegatronLayout
from placement.model_shape import ModelShape
from rl_actors.config import RunConfig
from rl_actors.data.chat import load_tokenizer
from rl_actors.data.prompts import load_prompts
from rl_actors.errors import ConfigError
from rl_actors.paths import input_path
from rl_actors.rewards.registry import resolve
from rl_actors.types import Prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """What the checks read on the way: the run's prompts, and the sizes that planning needs."""

    config: RunConfig
    shape: ModelShape
    layout: MegatronLayout
    engines: EngineLayout
    train_prompts: list[Prompt]
    eval_prompts: list[Prompt]


def prepare(config: RunConfig) -> Prepared:
    """Check a configuration against its model folder, data and reward.

    Returns:
        The configuration with absolute paths, and all prompts as token ids.

    Raises:
        ConfigError: what is wrong, where, and what to write instead.
    """
    config = with_absolute_paths(config)
    shape, layout, engines = check_model(config)
    resolve(config.reward.function, config.reward.kwargs)
    tokenizer = load_tokenizer(config.model.path)
    train = load_prompts(config.data, tokenizer, "train", _prompt_limit(config))
    held_out = load_prompts(config.data, tokenizer, "eval", _prompt_limit(config)) if config.data.eval else []
    return Prepared(config, shape, layout, engines, train, held_out[: config.evaluation.prompts])


def check_model(config: RunConfig) -> tuple[ModelShape, MegatronLayout, EngineLayout]:
    """Check the model folder and that both layouts can cut the model. Raises ConfigError."""
    folder = Path(config.model.path)
    if not folder.is_dir():
        raise ConfigError(
            f"model.path {config.model.path} is not a folder: give a Hugging Face model's folder "
            "(config.json, safetensors, tokenizer.json), or tiny:moe or tiny:dense"
        )
    shape = ModelShape.from_folder(folder)
    for pattern in ("*.safetensors", "tokenizer.json"):
        if not any(folder.glob(pattern)):
            raise ConfigError(f"model.path {folder} holds no {pattern}: give the folder of a whole Hugging Face model")
    layout, engines = MegatronLayout.from_config(config.trainer), EngineLayout.from_config(config.rollout)
    layout.check_model(shape)
    engines.check_model(shape)
    return shape, layout, engines


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The same configuration, meaning the same files from any folder and on any actor."""
    data = config.data.model_copy(
        update={name: _absolute(value) for name in ("train", "eval") if (value := getattr(config.data, name))}
    )
    model = config.model.model_copy(update={"path": _absolute(config.model.path)})
    return config.model_copy(update={"run_dir": str(config.run_path), "data": data, "model": model})


def _absolute(path: str) -> str:
    """The absolute path if there is something, else as given (it may be a name on the Hugging Face hub)."""
    return str(found) if (found := input_path(path)).exists() else path


def _prompt_limit(config: RunConfig) -> int:
    """Longest prompt in tokens that leaves room for a whole answer."""
    return min(config.data.max_prompt_tokens, config.rollout.max_model_len - config.rollout.max_new_tokens)
