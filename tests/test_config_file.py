"""A recipe means what a person reads in it, and a wrong one is answered with the right one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_actors.config_file import dump_config, load_config
from rl_actors.errors import ConfigError

MINIMAL = "run_dir: r\nmodel: {path: m}\ndata: {train: d}\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "my recipe.yaml"
    path.write_text(MINIMAL)
    return path


def test_words_and_numbers_are_read_as_written(recipe: Path) -> None:
    config = load_config(
        recipe, ["tracking.wandb=off", "trainer.optimizer.lr=1e-4", "data.chat_template=false", "seed=7"]
    )
    assert (config.tracking.wandb, config.trainer.optimizer.lr, config.seed) == ("off", 1e-4, 7)
    assert config.data.chat_template is False


def test_overrides_reach_sections_the_recipe_does_not_name(recipe: Path) -> None:
    assert load_config(recipe, ["trainer.optimizer.schedule=cosine"]).trainer.optimizer.schedule == "cosine"


def test_a_dumped_configuration_reads_back_the_same(recipe: Path, tmp_path: Path) -> None:
    config = load_config(recipe, ["tracking.wandb=off", "rollout.stop=[END]", "lora.targets=[linear_qkv]"])
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "dumped.yaml") == config


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("model: [", "not valid YAML"),
        ("- a list", "holds a list"),
        ("run_dir: r\ndata: {train: d}\n", "needs a value for 'model'"),
        (MINIMAL + "lorra: {rank: 4}\n", "unknown key 'lorra' .* did you mean 'lora'"),
        (MINIMAL + "trainer: {lr: 1}\n", "unknown key 'trainer.lr' .* did you mean 'trainer.optimizer.lr'"),
        (MINIMAL + "rollout: {temperature: -1}\n", "rollout.temperature = -1 cannot be used"),
    ],
)
def test_a_wrong_recipe_gets_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_config(path)
    assert "\n" not in str(caught.value) and "recipe.yaml" in str(caught.value)


def test_a_missing_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.yaml is not a file"):
        load_config(tmp_path / "no.yaml")
