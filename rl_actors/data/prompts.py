"""The dataset of a run as `Prompt`s: checked row by row, rendered, and cut to those that fit.

Invariant: a row is used as it is or named in an error; only prompts over the length limit are left out, and they
are counted.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from rl_actors.config import DataConfig
from rl_actors.data.chat import render_questions
from rl_actors.data.rows import Row, read_rows
from rl_actors.errors import ConfigError
from rl_actors.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class PromptList(list[Prompt]):
    """Prompts in the dataset's order.

    Attributes:
        too_long: how many rows were left out because their prompt is over `limit` tokens.
        limit: the limit that was applied, in tokens.
    """

    def __init__(self, prompts: Iterable[Prompt] = (), too_long: int = 0, limit: int = 0) -> None:
        super().__init__(prompts)
        self.too_long = too_long
        self.limit = limit


def load_prompts(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, part: Literal["train", "eval"], limit: int | None = None
) -> PromptList:
    """Read `data.train` or `data.eval` and render every question.

    Args:
        part: which of the two datasets.
        limit: longest prompt in tokens; None takes `data.max_prompt_tokens`.

    Raises:
        ConfigError: the dataset is missing, empty or broken, a column is missing, a question or an id cannot be
            used, or no prompt is short enough.
    """
    source, split = (data.train, data.split) if part == "train" else (data.eval, data.eval_split)
    if source is None:
        raise ConfigError("data.eval is not set: name the held-out prompts")
    where = f"data.{part} {source}"
    limit = data.max_prompt_tokens if limit is None else limit
    rows = read_rows(source, split, setting=f"data.{part}")
    _check_columns(rows, data, where)
    ids = _row_ids(rows, data.id_column, where)
    token_ids = render_questions([row[data.prompt_column] for row in rows], tokenizer, data)
    prompts = PromptList(limit=limit)
    for number, (row, prompt_id, tokens) in enumerate(zip(rows, ids, token_ids, strict=True), start=1):
        if not len(tokens):
            raise ConfigError(f"{where}: row {number} renders to no tokens: see the model's chat template")
        if len(tokens) > limit:
            prompts.too_long += 1
        else:
            answer = row.get(data.answer_column)
            prompts.append(Prompt(prompt_id, tokens, row[data.prompt_column], answer, _metadata(row, data)))
    if not prompts:
        shortest = min(len(tokens) for tokens in token_ids)
        raise ConfigError(
            f"{where}: all {len(rows)} prompts are longer than {limit} tokens (the shortest has {shortest}): "
            "raise data.max_prompt_tokens, or rollout.max_model_len if that is what limits them"
        )
    if prompts.too_long:
        logger.warning(
            "%s: %d of %d prompts are longer than %d tokens: left out", where, prompts.too_long, len(rows), limit
        )
    return prompts


def _check_columns(rows: list[Row], data: DataConfig, where: str) -> None:
    """Every row has the columns; every question is text with something in it."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    for setting in ("prompt_column", "answer_column", "id_column"):
        column = getattr(data, setting)
        if column is None or column in columns:
            continue
        if not columns:
            raise ConfigError(f"{where} has rows without any column: give each a {data.prompt_column!r}")
        near = difflib.get_close_matches(column, columns, n=1, cutoff=0.5)
        hint = f": did you mean data.{setting}={near[0]}?" if near else f": set data.{setting} to one of them"
        raise ConfigError(f"{where} has no column {column!r}, only {', '.join(map(repr, columns))}{hint}")
    for number, row in enumerate(rows, start=1):
        question = row.get(data.prompt_column)
        if not isinstance(question, str):
            found = "is missing" if question is None else f"is a {type(question).__name__}, not text"
            raise ConfigError(f"{where}: row {number}: {data.prompt_column!r} {found}")
        if not question.strip():
            raise ConfigError(f"{where}: row {number}: {data.prompt_column!r} is empty")
        try:
            question.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{where}: row {number}: {data.prompt_column!r} is not valid Unicode (character {error.start + 1} is "
                "half of a surrogate pair): correct the row"
            ) from error
    if all(row.get(data.answer_column) is None for row in rows):
        raise ConfigError(f"{where}: {data.answer_column!r} is null in every row: set data.answer_column to another")


def _row_ids(rows: list[Row], column: str | None, where: str) -> list[str]:
    """The id of every row: its number from 0, or what the id column says, which must be there and unique."""
    if column is None:
        return [str(number) for number in range(len(rows))]
    first_seen: dict[str, int] = {}
    for number, row in enumerate(rows, start=1):
        if (value := row.get(column)) is None:
            raise ConfigError(f"{where}: row {number}: {column!r} is missing")
        if (earlier := first_seen.setdefault(str(value), number)) != number:
            raise ConfigError(f"{where}: rows {earlier} and {number} have the same {column!r}, {str(value)!r}")
    return list(first_seen)


def _metadata(row: Row, data: DataConfig) -> dict[str, Any]:
    """All other columns. A column `metadata` that holds an object is spread out, as reasoning-gym's rows have it."""
    used = (data.prompt_column, data.answer_column, data.id_column)
    others = {column: value for column, value in row.items() if column not in used}
    nested = others.get("metadata")
    if isinstance(nested, Mapping):
        del others["metadata"]
        others = {**nested, **others}
    return others
