"""The tokenizer of a model folder, and questions rendered with its chat template into token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rl_actors.config import DataConfig
from rl_actors.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(model_path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a model folder.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(model_path), local_files_only=True)
    except Exception as error:  # the library raises many types for a folder without a usable tokenizer
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"model.path {model_path} has no tokenizer that can be loaded: {reason}") from error
    return tokenizer


def render_questions(
    questions: Sequence[str], tokenizer: PreTrainedTokenizerBase, data: DataConfig
) -> list[np.ndarray]:
    """Questions as int32 [P] token ids, ready to be answered.

    With `data.chat_template` a question is the user's turn behind an optional system turn, and the template adds what
    opens the assistant's turn. Without, the tokenizer adds its own beginning-of-sequence token, if it has one.

    Raises:
        ConfigError: the tokenizer has no chat template, or the template fails.
    """
    if data.chat_template:
        texts = [_render(question + data.prompt_suffix, tokenizer, data) for question in questions]
    else:
        system = f"{data.system_prompt}\n" if data.system_prompt else ""
        texts = [system + question + data.prompt_suffix for question in questions]
    # The template has already written the special tokens.
    try:
        encoded = tokenizer(texts, add_special_tokens=not data.chat_template, verbose=False)
    except Exception as error:  # lone surrogates in data.system_prompt, for one, are a TypeError
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"the model's tokenizer refuses the prompts ({type(error).__name__}: {reason}): "
            "see data.system_prompt and data.prompt_suffix"
        ) from error
    return [np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"]]


def _render(question: str, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> str:
    if not tokenizer.chat_template:
        raise ConfigError("the model's tokenizer has no chat template: set data.chat_template=false, or add one to it")
    turns = [{"role": "user", "content": question}]
    if data.system_prompt:
        turns.insert(0, {"role": "system", "content": data.system_prompt})
    try:
        return str(
            tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True, **data.chat_template_kwargs
            )
        )
    except Exception as error:  # templates are programs: they raise what they like
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"the model's chat template failed ({type(error).__name__}: {reason}): "
            "see data.chat_template_kwargs and data.system_prompt"
        ) from error
