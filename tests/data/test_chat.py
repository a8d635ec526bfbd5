"""The chat template is applied as the tokenizer has it, and a tokenizer without one is refused."""

import copy

import pytest

from rl_actors.config import DataConfig
from rl_actors.data.chat import load_tokenizer, render_questions
from rl_actors.errors import ConfigError

DATA = DataConfig(train="x.jsonl")


def test_special_tokens_stand_once(tokenizer):
    (ids,) = render_questions(["12"], tokenizer, DATA)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|user|>", "1", "2", "<|end|>", "<|assistant|>"]


def test_template_arguments_arrive(tokenizer):
    tokenizer = _with_template(tokenizer, "{{ messages[0]['content'] }}{% if loud %}!{% endif %}")
    (ids,) = render_questions(["12"], tokenizer, DATA.model_copy(update={"chat_template_kwargs": {"loud": True}}))
    assert tokenizer.decode(ids) == "12!"


def test_tokenizer_without_template(tokenizer):
    with pytest.raises(ConfigError, match=r"no chat template: set data\.chat_template=false"):
        render_questions(["12"], _with_template(tokenizer, None), DATA)


def test_template_that_refuses(tokenizer):
    template = "{{ raise_exception('no system turn here') }}"
    with pytest.raises(ConfigError, match=r"no system turn here.*data\.system_prompt"):
        render_questions(["12"], _with_template(tokenizer, template), DATA)


def test_tokenizer_of_a_folder(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).get_vocab() == tokenizer.get_vocab()


def test_folder_without_tokenizer(tmp_path):
    with pytest.raises(ConfigError, match="has no tokenizer that can be loaded"):
        load_tokenizer(tmp_path)


def _with_template(tokenizer, template):
    changed = copy.copy(tokenizer)
    changed.chat_template = template
    return changed
