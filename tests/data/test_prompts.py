"""Rows become prompts as they are, or are named in an error; too long ones are counted."""

import json

import numpy as np
import pytest

from rl_actors.config import DataConfig
from rl_actors.data.prompts import load_prompts
from rl_actors.errors import ConfigError


@pytest.fixture
def load(tmp_path, tokenizer):
    """Load rows with DataConfig settings; `limit` is given apart."""

    def load(rows, limit=None, **settings):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_prompts(DataConfig(train=str(path), **settings), tokenizer, "train", limit)

    return load


def test_prompt_holds_the_row(load, tokenizer):
    row = {"question": "2 + 2 =", "answer": "4", "level": 1, "metadata": {"source_dataset": "chain_sum"}}
    (prompt,) = load([row])
    assert (prompt.id, prompt.text, prompt.answer) == ("0", "2 + 2 =", "4")
    assert prompt.metadata == {"level": 1, "source_dataset": "chain_sum"}
    assert prompt.token_ids.dtype == np.int32
    assert tokenizer.decode(prompt.token_ids) == "<|user|>2 + 2 =<|end|><|assistant|>"


def test_system_prompt_and_suffix(load, tokenizer):
    (prompt,) = load([{"question": "2?", "answer": ""}], system_prompt="Be brief.", prompt_suffix=" Think.")
    assert tokenizer.decode(prompt.token_ids) == "<|system|>Be brief.<|end|><|user|>2? Think.<|end|><|assistant|>"
    assert prompt.text == "2?"


def test_without_chat_template(load, tokenizer):
    (prompt,) = load([{"question": "2?", "answer": ""}], chat_template=False)
    assert tokenizer.decode(prompt.token_ids) == "2?"


def test_long_prompts_are_left_out_and_counted(load, caplog):
    rows = [{"question": "x" * length, "answer": ""} for length in (5, 50, 6, 60)]
    prompts = load(rows, limit=20)
    assert [prompt.id for prompt in prompts] == ["0", "2"]
    assert prompts.too_long == 2
    assert "2 of 4 prompts are longer than 20 tokens" in caplog.text


def test_the_limit_itself_fits(load):
    question = [{"question": "x" * 10, "answer": ""}]
    length = len(load(question)[0].token_ids)
    assert load(question, limit=length).too_long == 0
    with pytest.raises(
        ConfigError, match=rf"all 1 prompts are longer than {length - 1} tokens \(the shortest has {length}"
    ):
        load(question, limit=length - 1)


def test_ids_from_a_column(load):
    rows = [{"question": "a", "answer": "", "key": 7}, {"question": "b", "answer": "", "key": "x"}]
    assert [prompt.id for prompt in load(rows, id_column="key")] == ["7", "x"]


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        (
            [{"questions": "a", "answer": ""}],
            {},
            "no column 'question', only 'questions', 'answer': did you mean data.prompt_column=questions",
        ),
        (
            [{"zzz": "a", "answer": ""}],
            {},
            "no column 'question', only 'zzz', 'answer': set data.prompt_column to one of them",
        ),
        ([{}, {}], {}, "has rows without any column: give each a .question"),
        ([{"question": "a", "solution": ""}], {}, "no column 'answer'"),
        ([{"question": "a", "answer": ""}], {"id_column": "key"}, "no column 'key'"),
        ([{"question": "a", "answer": ""}, {"question": None, "answer": ""}], {}, "row 2: 'question' is missing"),
        ([{"question": "a", "answer": ""}, {"answer": ""}], {}, "row 2: 'question' is missing"),
        ([{"question": 5, "answer": ""}], {}, "row 1: 'question' is a int, not text"),
        ([{"question": " ", "answer": ""}], {}, "row 1: 'question' is empty"),
        ([{"question": "a\ud800", "answer": ""}], {}, "row 1: 'question' is not valid Unicode .character 2"),
        ([{"question": "a", "answer": None}], {}, "'answer' is null in every row"),
        ([{"question": "a", "answer": ""}], {"system_prompt": "\ud800"}, "refuses the prompts"),
        ([{"question": "a", "answer": "", "k": 1}] * 2, {"id_column": "k"}, "rows 1 and 2 have the same 'k', '1'"),
        (
            [{"question": "a", "answer": "", "k": 1}, {"question": "a", "answer": ""}],
            {"id_column": "k"},
            "row 2: 'k' is missing",
        ),
    ],
)
def test_faults_in_rows(load, rows, settings, message):
    with pytest.raises(ConfigError, match=message):
        load(rows, **settings)


def test_eval_must_be_named(tokenizer):
    with pytest.raises(ConfigError, match=r"data\.eval is not set"):
        load_prompts(DataConfig(train="x.jsonl"), tokenizer, "eval")


def test_template_that_renders_to_nothing(load, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{# nothing #}")
    with pytest.raises(ConfigError, match="row 1 renders to no tokens"):
        load([{"question": "a", "answer": ""}])
