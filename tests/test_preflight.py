"""What cannot work is refused before a pool starts, and without leaving anything behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rl_actors.config_file import parse_config
from rl_actors.errors import ConfigError
from rl_actors.preflight import check_files, check_model, check_run_dir, check_storage, check_weights

MODEL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
}


def _check(folder: Path, shape: dict | None = None, **sections) -> None:
    (folder / "config.json").write_text(json.dumps(MODEL | (shape or {})))
    tree = {"run_dir": "r", "model": {"path": str(folder)}, "data": {"train": "d"}, "rollout": {"max_model_len": 2048}}
    sections["model"] = tree["model"] | sections.get("model", {})
    check_model(parse_config(tree | sections, "test"))


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"rollout": {"max_model_len": 2049}}, "max_model_len = 2049 .* use at most 2048"),
        ({"trainer": {"tp": 4}, "lora": {"rank": 6}}, "lora.rank = 6 .* trainer.tp = 4: use 8"),
        ({"trainer": {"cp": 2}, "placement": {"device": "cpu"}}, "trainer.cp = 2 needs GPUs"),
        (
            {"rollout": {"tp": 2, "max_model_len": 2048}, "placement": {"device": "cpu"}},
            "rollout.tp = 2 needs GPUs",
        ),
        ({"sync": {"mode": "adapter"}, "lora": {"rank": 600}}, "lora.rank = 600 .*at most 512.*: lower it"),
        (
            {"sync": {"mode": "adapter"}, "placement": {"device": "gpu"}, "model": {"dtype": "float32"}},
            "vLLM's LoRA kernels on GPU .* model.dtype = bfloat16",
        ),
        (
            {
                "rollout": {"sleep": "kv", "max_model_len": 2048},
                "placement": {"device": "cpu", "colocate": True},
                "pipeline": {"max_staleness": 0},
            },
            "on CPU an engine keeps its memory",
        ),
    ],
)
def test_sizes_that_do_not_agree(tmp_path: Path, sections: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        _check(tmp_path, **sections)


def test_a_rank_that_top_k_does_not_divide(tmp_path: Path) -> None:
    moe = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
    lora = {"rank": 6, "normalize_moe_lora": True}
    with pytest.raises(ConfigError, match=r"lora.rank = 6 .* the 4 experts .* lora.normalize_moe_lora .*: use 8"):
        _check(tmp_path, moe, lora=lora)
    _check(tmp_path, moe, lora={"rank": 8, "normalize_moe_lora": True})
    _check(tmp_path, lora=lora)  # a dense model has no experts to divide for


def test_a_rank_that_no_linear_can_use(tmp_path: Path) -> None:
    _check(tmp_path, lora={"rank": 64})
    with pytest.raises(ConfigError, match=r"lora.rank = 65 .*linear_qkv, is 192 x 64\): use at most 64$"):
        _check(tmp_path, lora={"rank": 65})
    _check(tmp_path, lora={"rank": 64, "variant": "canonical_lora"})  # key and value are 64 wide too
    moe = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
    only_experts = {"targets": ["linear_fc1"], "normalize_moe_lora": True}
    _check(tmp_path, moe, lora={"rank": 256, **only_experts})
    with pytest.raises(ConfigError, match=r"lora\.rank = 260 .*use at most 256"):
        _check(tmp_path, moe, lora={"rank": 260, **only_experts})


def test_targets_are_checked_against_the_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora.targets: '\*.layers.2.\*' matches no linear .* layers are 0 to 1"):
        _check(tmp_path, lora={"targets": ["*.layers.2.*"]})


def test_sizes_that_agree(tmp_path: Path) -> None:
    _check(tmp_path, trainer={"tp": 4}, lora={"rank": 8})
    _check(tmp_path, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, rollout={"max_model_len": 4096})


@pytest.mark.parametrize(
    ("run_dir", "sentence"), [("file", "is a file"), ("file/x/y", "lies below .*file"), ("new/x", "not writable")]
)
def test_run_folder(tmp_path: Path, run_dir: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    check_run_dir(tmp_path / "new" / "x")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ConfigError, match=sentence):
        check_run_dir(tmp_path / run_dir)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("storage", "sentence"),
    [
        ("file", "checkpoint.storage .*file is a file: give a folder"),
        ("file/x", "lies below .*file, which is a file"),
        ("foo://bucket/x", "checkpoint.storage foo://bucket/x is not usable .*: give s3://bucket/path"),
        ("file://host/x", "checkpoint.storage file://host/x is not usable"),
    ],
)
def test_storage(tmp_path: Path, storage: str, sentence: str) -> None:
    (tmp_path / "file").touch()
    check_storage(str(tmp_path / "new" / "x"))
    check_storage(f"file://{tmp_path}/new")
    with pytest.raises(ConfigError, match=sentence) as caught:
        check_storage(storage if "://" in storage else str(tmp_path / storage))
    assert "\n" not in str(caught.value)


def _index(folder: Path, content: str) -> None:
    (folder / "model.safetensors.index.json").write_text(content)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda folder: (folder / "a.safetensors").write_bytes(b""), "a.safetensors is empty"),
        (
            lambda folder: (folder / "a.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid"),
            "Git-LFS pointer",
        ),
        (
            lambda folder: (folder / "a.safetensors").write_bytes((folder / "a.safetensors").read_bytes()[:-8]),
            "a.safetensors is not a whole safetensors file",
        ),
        (lambda folder: (folder / "a.safetensors").write_bytes(b"hello" * 9), "not a whole safetensors file"),
        (lambda folder: (folder / "b.safetensors").symlink_to("nowhere"), "b.safetensors is not a whole"),
        (lambda folder: _index(folder, '{"weight_map": {"x": "b.safetensors"}}'), "names b.safetensors, .* missing"),
        (lambda folder: _index(folder, "[]"), "not a safetensors index"),
        (lambda folder: _index(folder, '{"weight_map": 5}'), "not a safetensors index"),
    ],
)
def test_weights(tmp_path: Path, spoil, sentence: str) -> None:
    save_file({"x": np.zeros(64, np.float32)}, tmp_path / "a.safetensors")
    check_weights(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ConfigError, match=sentence) as caught:
        check_weights(tmp_path)
    assert "\n" not in str(caught.value)


def test_random_weights_need_no_weights_and_may_be_cut(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "tokenizer.json").touch()
    tree = {"run_dir": "r", "data": {"train": "d"}, "rollout": {"max_model_len": 2048}}

    def layers(**model: object) -> int:
        config = parse_config(tree | {"model": {"path": str(tmp_path), **model}}, "test")
        check_files(config)
        return check_model(config)[0].num_layers

    assert (layers(random_weights=True), layers(random_weights=True, layers=1)) == (2, 1)
    for model, sentence in (
        ({}, "holds no \\*.safetensors"),
        ({"random_weights": True, "layers": 3}, "model.layers = 3 is more than the model's 2 layers: use at most 2"),
        ({"layers": 1}, "set random_weights too"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            layers(**model)
