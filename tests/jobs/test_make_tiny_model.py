"""The tiny model is a whole Hugging Face folder, made once, the same for the same seed.

Trained for a few steps only: what is tested does not depend on how good the model is.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from jobs.make_tiny_model import find_tiny_model, make_tiny_model
from jobs.tiny_model.settings import TinyModelSettings, TrainingSettings
from jobs.tiny_model.task import split_of, stepwise_answer
from jobs.tiny_model.training import IGNORED, encode
from rl_actors.config import DataConfig
from rl_actors.data.prompts import load_prompts
from rl_actors.errors import ConfigError
from rl_actors.rewards.reasoning_gym import reward

SETTINGS = TinyModelSettings(training=TrainingSettings(steps=3, batch=8), train_prompts=40, eval_prompts=10)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The MoE twice, and the dense model."""
    root = tmp_path_factory.mktemp("models with a space")
    made = {"moe": SETTINGS, "again": SETTINGS, "dense": replace(SETTINGS, arch="dense")}
    with ThreadPoolExecutor() as pool:  # each is made by a process of its own, which imports more than it trains
        list(pool.map(lambda name: make_tiny_model(root / name, made[name], progress=False), made))
    return {name: root / name for name in made}


@pytest.mark.parametrize(("arch", "name"), [("moe", "Qwen3MoeForCausalLM"), ("dense", "Qwen3ForCausalLM")])
def test_folder_loads(folders, arch, name):
    model = AutoModelForCausalLM.from_pretrained(folders[arch])
    tokenizer = AutoTokenizer.from_pretrained(folders[arch])
    assert type(model).__name__ == name
    assert model.dtype == torch.float32
    assert 0.9e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.2e6
    assert model.config.vocab_size == len(tokenizer)
    assert (model.config.eos_token_id, model.config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


@pytest.mark.parametrize("arch", ["moe", "dense"])
def test_every_layout_fits(folders, arch):
    config = json.loads((folders[arch] / "config.json").read_text())
    for size in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers", "hidden_size"):
        assert config[size] % 2 == 0, size
    assert config["vocab_size"] % 8 == 0
    assert config["head_dim"] >= 32
    if arch == "moe":
        assert config["num_experts"] % 4 == 0
        assert config["moe_intermediate_size"] % 4 == 0


def test_same_seed_same_bits(folders):
    first, second = (load_file(folders[name] / "model.safetensors") for name in ("moe", "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name in ("tokenizer.json", "train.jsonl", "eval.jsonl"):
        assert (folders["moe"] / name).read_bytes() == (folders["again"] / name).read_bytes()


def test_second_call_makes_nothing(folders):
    before = (folders["moe"] / "model.safetensors").stat().st_mtime_ns
    make_tiny_model(folders["moe"], SETTINGS)
    assert (folders["moe"] / "model.safetensors").stat().st_mtime_ns == before
    assert find_tiny_model(folders["moe"], replace(SETTINGS, seed=1)) is None


def test_nothing_else_is_left_behind(folders):
    assert {path.name for path in folders["moe"].parent.iterdir()} == set(folders)


def test_splits_share_no_question(folders):
    prompts = {
        part: [json.loads(line) for line in (folders["moe"] / f"{part}.jsonl").read_text().splitlines()]
        for part in ("train", "eval")
    }
    assert [len(rows) for rows in prompts.values()] == [40, 10]
    for part, rows in prompts.items():
        assert {split_of(row["metadata"]["expression"]) for row in rows} == {part}
        assert len({row["question"] for row in rows}) == len(rows)


def test_prompts_are_read_and_scored(folders):
    tokenizer = AutoTokenizer.from_pretrained(folders["moe"])
    data = DataConfig(train=str(folders["moe"] / "train.jsonl"), id_column="id")
    for prompt in load_prompts(data, tokenizer, "train"):
        answer = stepwise_answer(prompt.metadata["expression"])
        assert reward(prompt, answer) == 1.0
        assert len(prompt.token_ids) <= 16
        assert len(tokenizer(answer + tokenizer.eos_token).input_ids) <= 20


def test_any_text_survives_the_tokenizer(folders):
    tokenizer = AutoTokenizer.from_pretrained(folders["moe"])
    for text in ("Janet\u2019s ducks lay 16 eggs.\n#### 18", "<answer>-7</answer>", "\U0001f642 \\boxed{1}"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_only_answers_are_learnt(folders):
    tokenizer = AutoTokenizer.from_pretrained(folders["moe"])
    tokens, labels = encode([("1 + 2 =", "3"), ("1 + 2 + 3 =", "3 <answer>6</answer>")], tokenizer)
    assert tokenizer.decode(labels[0][labels[0] != IGNORED]) == "3<|end|>"
    assert tokenizer.decode(labels[1][labels[1] != IGNORED]) == "3 <answer>6</answer><|end|>"
    assert tokens.shape == labels.shape


def test_a_foreign_folder_is_not_overwritten(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="was not made by this command"):
        make_tiny_model(tmp_path, SETTINGS)
    assert (tmp_path / "thesis.txt").exists()


def test_command_finds_a_made_model_without_torch(folders, tmp_path):
    """The whole call, so that "at once" is not spoilt by an import."""
    code = (
        "import sys; from pathlib import Path; from jobs.make_tiny_model import find_tiny_model; "
        "from jobs.tiny_model.settings import TinyModelSettings; "
        "find_tiny_model(Path(sys.argv[1]), TinyModelSettings()); "
        "assert not {'torch', 'reasoning_gym', 'transformers'} & set(sys.modules)"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code, str(folders["moe"])], check=True, cwd=root)
