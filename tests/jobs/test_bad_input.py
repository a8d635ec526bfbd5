"""Bad input ends in one clear sentence, before anything is started."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.cli import read_recipe
from rl_actors.errors import ConfigError
from rl_actors.preflight import Prepared, prepare

RECIPE = "jobs/configs/quickstart.yaml"


def check(model: Path, *overrides: str, recipe: str = RECIPE) -> Prepared:
    """What `jobs.train` does before it joins Ray."""
    data = [
        f"data.train={json.dumps(str(model / 'train.jsonl'))}",
        f"data.eval={json.dumps(str(model / 'eval.jsonl'))}",
    ]
    path = f"model.path={json.dumps(str(model))}"
    return prepare(read_recipe(str(Path(__file__).resolve().parents[2] / recipe), [path, *data, *overrides]))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.epp=2", r"unknown key 'trainer.epp' .* did you mean 'trainer.pp'"),
        ("optimizer.lr=1", r"unknown key 'optimizer' .* did you mean 'trainer.optimizer'"),
        ("trainer.ep=0", r"trainer.ep = 0 cannot be used: .* greater than 0"),
        ("trainer.tp=many", r"trainer.tp = 'many' cannot be used"),
        ("trainer", r"'trainer' is not of the form section.key=value"),
        ("trainer.tp.x=1", r"trainer.tp = {'x': 1} cannot be used"),
        ("model.path=/no/such/folder", r"model.path /no/such/folder is not a folder"),
        ("data.train=/no/such/file.jsonl", r"/no/such/file.jsonl"),
        ("data.prompt_column=qestion", r"qestion.*question"),
        ("trainer.tp=3", r"trainer.tp = 3 does not divide .* heads"),
        ("trainer.ep=3", r"trainer.ep = 3 does not divide .* experts"),
        ("trainer.pp=3", r"trainer.pp = 3 does not divide .* layers"),
        ("rollout.max_new_tokens=128", r"leaves no room for a prompt"),
        ("pipeline.samples_per_prompt=1", r"at least 2"),
        ("reward.function=gsm8", r"gsm8.*did you mean 'gsm8k'"),
        ("reward.function=no_such_module:score", r"no_such_module"),
        ("reward.function=rl_actors.rewards.gsm8k:rewad", r"did you mean rl_actors.rewards.gsm8k:reward"),
        ("reward.kwargs={no_such_argument: 1}", r"no_such_argument"),
        ("data.max_prompt_tokens=2", r"all .*2 tokens|no prompt|every"),
    ],
)
def test_one_sentence_says_what_is_wrong(tiny_moe: Path, override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        check(tiny_moe, override)
    assert "\n" not in str(caught.value)


def test_an_empty_dataset_is_refused(tiny_moe: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty set.jsonl"
    empty.write_text("")
    with pytest.raises(ConfigError, match=r"empty set\.jsonl"):
        check(tiny_moe, f"data.train={json.dumps(str(empty))}")


def test_a_model_folder_without_weights_is_refused(tiny_moe: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_moe / "config.json", tmp_path)
    with pytest.raises(ConfigError, match="safetensors"):
        check(tiny_moe, f"model.path={json.dumps(str(tmp_path))}")


def test_long_prompts_are_dropped_and_counted(tiny_moe: Path) -> None:
    lengths = sorted(len(prompt.token_ids) for prompt in check(tiny_moe).train_prompts)
    limit = lengths[len(lengths) // 2]
    kept = check(tiny_moe, f"data.max_prompt_tokens={limit}").train_prompts
    assert len(kept) == sum(length <= limit for length in lengths) and kept.too_long == len(lengths) - len(kept)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.epp=2", "did you mean 'trainer.pp'"),
        ("trainer.replicas=4000", "needs 4001 bundles"),
        ("rollout.tp=2", "needs GPUs"),
    ],
)
def test_the_job_says_it_with_exit_code_2_within_half_a_minute(
    tiny_moe: Path, tmp_path: Path, run_job: Callable, override: str, sentence: str
) -> None:
    data = f"data={{train: {json.dumps(str(tiny_moe / 'train.jsonl'))}}}"
    model, run_dir = f"model.path={json.dumps(str(tiny_moe))}", f"run_dir={json.dumps(str(tmp_path / 'run'))}"
    started = time.monotonic()
    done = run_job("train", RECIPE, model, data, run_dir, override)
    took = time.monotonic() - started
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr.strip().splitlines()[-1]
    assert not (tmp_path / "run").exists()
    assert took < 30
