"""A released model's sizes without its weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.make_shape import SHAPES, make_shape
from jobs.shapes.tokenizer import make_tokenizer
from placement.model_shape import ModelShape
from rl_actors.errors import ConfigError

PARAMETERS = {"qwen3-30b-a3b": 30_532_122_624, "qwen3-0.6b": 596_049_920}
"""As counted in the released models' safetensors."""


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_sizes_are_the_released_models(name: str, parameters: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((SHAPES / f"{name}.json").read_text())
    assert ModelShape.from_folder(tmp_path).parameters == parameters


def test_the_folder_is_read_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    folder = make_shape("qwen3-0.6b", tmp_path / "shape", layers=3)
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert config.num_hidden_layers == 3
    assert len(tokenizer) == config.vocab_size == 151936
    assert config.eos_token_id == tokenizer.eos_token_id is not None


def test_every_text_can_be_encoded_and_every_id_decoded() -> None:
    tokenizer = make_tokenizer(2000, 128)
    text = "Natalia sold 48 clips, ½ of them in May.\n"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    words = [tokenizer.decode([number]) for number in range(300, 2000)]
    assert all(words) and len(set(words)) == len(words)


def test_what_lies_in_the_way_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").touch()
    for out, sentence in (("file", "is a file"), ("file/x", "lies below .*file"), ("model", "a model's weights")):
        with pytest.raises(ConfigError, match=f"--out .*{sentence}"):
            make_shape("bench-moe", tmp_path / out)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["model.safetensors"]


def test_an_unknown_shape_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"shape:gpt names no model's sizes: use shape:bench-moe or"):
        make_shape("gpt", tmp_path)
