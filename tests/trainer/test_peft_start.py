"""A run starts from a PEFT folder as `peft` itself sees it, or is refused with what to set instead."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoint_tasks as tasks
import numpy as np
import pytest
import torch
from rank_process import RankProcesses, with_layout
from safetensors.torch import load_file, save_file
from tiny_models import huggingface_logprobs, make_batch, save_tiny_model

from placement.model_shape import ModelShape
from rl_actors.config import RunConfig
from rl_actors.errors import ConfigError
from rl_actors.lora_config import LoraConfig
from rl_actors.trainer.peft_start import PeftFolder
from rl_actors.trainer.pool import merge_logprobs

TEMPERATURE = 0.7
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
DENSE = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def make_with_peft(base: Path, folder: Path, same_a: bool = False, **settings: Any) -> Path:
    """An adapter of random A's and B's, made and merged by `peft`; returns the folder of the merged model."""
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "lora_alpha": 8, **settings}))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                shared = torch.Generator().manual_seed(2) if same_a and ".lora_A." in name else generator
                parameter.normal_(std=0.1, generator=shared)
    adapted.save_pretrained(folder)
    adapted.merge_and_unload().save_pretrained(folder / "merged")
    return folder / "merged"


def config_for(base: Path, folder: Path, **lora: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_dir": "unused",
            "model": {"path": str(base), "dtype": "float32"},
            "data": {"train": "unused"},
            "lora": {"init_from": str(folder), **lora},
            "trainer": {"micro_batch_tokens": 64, "optimizer": {"lr": 5e-3}},
            "rollout": {"temperature": TEMPERATURE},
        }
    )


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {arch: save_tiny_model(tmp_path_factory.mktemp(arch) / "base", arch) for arch in ("dense", "moe")}


@pytest.mark.parametrize(
    ("arch", "peft", "lora", "layout"),
    [
        ("dense", {"target_modules": DENSE}, {"rank": 12, "alpha": 24}, {"tp": 2}),
        ("dense", {"target_modules": DENSE, "same_a": True}, {"rank": 4, "alpha": 8}, {"replicas": 2}),
        (
            "dense",
            {"target_modules": ["q_proj", "v_proj"], "use_rslora": True},
            {"rank": 16, "alpha": 64, "targets": ["linear_qkv"]},
            {},
        ),
        (
            "moe",
            {"target_modules": ATTENTION, "target_parameters": EXPERTS},
            {"rank": 12, "alpha": 24},
            {"tp": 2, "pp": 2, "ep": 2},
        ),
        (
            "moe",
            {"target_modules": ATTENTION, "target_parameters": EXPERTS},
            {"variant": "canonical_lora", "rank": 4, "alpha": 8},
            {"ep": 2},
        ),
    ],
    ids=["own A's at tp2", "one A at dp2", "a part at rank 16", "moe at tp2 pp2 ep2", "canonical moe at ep2"],
)
def test_the_first_step_is_what_peft_sees(
    rank_processes: RankProcesses,
    bases: dict[str, Path],
    tmp_path: Path,
    arch: str,
    peft: dict,
    lora: dict,
    layout: dict,
) -> None:
    merged = make_with_peft(bases[arch], tmp_path, **peft)
    config, batch = config_for(bases[arch], tmp_path, **lora), make_batch()
    PeftFolder(tmp_path, ModelShape.from_folder(bases[arch])).check(config.lora)
    expected = huggingface_logprobs(merged, batch, TEMPERATURE)
    batch = replace(batch, old_logprobs=expected)
    answers = rank_processes.run(tasks.first_look, with_layout(config, **layout), batch)
    assert np.abs(expected - huggingface_logprobs(bases[arch], batch, TEMPERATURE)).max() > 0.1
    started = merge_logprobs(batch, [answer["logprobs"] for answer in answers])
    np.testing.assert_allclose(started, expected, atol=1e-4, rtol=0)
    assert all(answer["steps"] == 1 and np.isfinite(answer["loss"]) for answer in answers)


@pytest.mark.parametrize(
    ("peft", "lora", "sentence"),
    [
        ({}, {"rank": 4, "alpha": 8}, r"needs lora\.rank=12 and lora\.alpha=24, .*canonical_lora with lora\.rank=4$"),
        ({"same_a": True}, {"rank": 2, "alpha": 4}, r"needs lora\.rank=4 and lora\.alpha=8, not rank 2"),
        ({"same_a": True}, {"rank": 4, "alpha": 16}, r"scales adapters by 4, .* by 2: use lora\.alpha=8$"),
        (
            {},
            {"rank": 12, "alpha": 24, "targets": ["linear_qkv"]},
            r"adapts .*\.down_proj, .*add linear_fc1, linear_fc2, linear_proj to",
        ),
        ({"target_modules": ATTENTION}, {"rank": 12, "alpha": 24}, r"linear_fc1, which .* does not: leave linear_fc1"),
        ({}, {"variant": "canonical_lora", "rank": 4, "alpha": 4}, r"by 1, .* by 2: use lora\.alpha=8$"),
        (
            {"same_a": True, "use_rslora": True},
            {"rank": 4, "alpha": 4},
            r"use lora\.alpha=16$",
        ),
        (
            {"same_a": True, "use_rslora": True, "lora_alpha": 7},
            {"rank": 9, "alpha": 4},
            r"whole lora\.alpha scales by 3\.5$",
        ),
        ({}, {"variant": "dora"}, r"cannot start lora\.variant=dora"),
        ({"use_dora": True}, {}, "use_dora = True: only plain LoRA"),
        ({"modules_to_save": ["lm_head"]}, {}, r"modules_to_save = \['lm_head'\]"),
    ],
    ids=[
        "own A's",
        "rank",
        "alpha",
        "fewer targets",
        "more targets",
        "canonical",
        "rslora",
        "no whole alpha",
        "to dora",
        "dora",
        "saved modules",
    ],
)
def test_what_disagrees_is_one_sentence(
    bases: dict[str, Path], tmp_path: Path, peft: dict, lora: dict, sentence: str
) -> None:
    make_with_peft(bases["dense"], tmp_path, **{"target_modules": DENSE, **peft})
    with pytest.raises(ConfigError, match=sentence) as caught:
        PeftFolder(tmp_path, ModelShape.from_folder(bases["dense"])).check(LoraConfig(**lora))
    assert "\n" not in str(caught.value)


def test_wildcards_and_exclusions_choose_as_the_model_does(bases: dict[str, Path], tmp_path: Path) -> None:
    make_with_peft(bases["dense"], tmp_path, target_modules=["q_proj", "k_proj", "v_proj"], layers_to_transform=[1])
    folder = PeftFolder(tmp_path, ModelShape.from_folder(bases["dense"]))
    folder.check(LoraConfig(rank=12, alpha=24, targets=["*.layers.1.*.linear_qkv"]))
    folder.check(LoraConfig(rank=12, alpha=24, targets=["linear_qkv"], exclude=["*.layers.0.*"]))
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attention\.linear_qkv, which"):
        folder.check(LoraConfig(rank=12, alpha=24, targets=["linear_qkv"]))


def test_no_folder_another_model_and_damage(bases: dict[str, Path], tmp_path: Path) -> None:
    shape = ModelShape.from_folder(bases["dense"])
    with pytest.raises(ConfigError, match=r"is not a PEFT folder with adapter_config\.json"):
        PeftFolder(tmp_path, shape)
    make_with_peft(bases["dense"], tmp_path, target_modules=DENSE)
    wider = ModelShape(**{**shape.__dict__, "hidden": 2 * shape.hidden})
    with pytest.raises(ConfigError, match=r"belongs to another model: model\.layers\.0\.self_attn\.q_proj"):
        PeftFolder(tmp_path, wider).check(LoraConfig(rank=12, alpha=24))
    weights = tmp_path / "adapter_model.safetensors"
    whole = load_file(weights)
    save_file({**whole, "base_model.model.embed_tokens.lora_embedding_A": torch.zeros(2)}, weights)
    with pytest.raises(ConfigError, match=r"holds base_model\.model\.embed_tokens.*cannot be taken over"):
        PeftFolder(tmp_path, shape)
    lost = next(name for name in whole if ".lora_B." in name)
    save_file({name: tensor for name, tensor in whole.items() if name != lost}, weights)
    with pytest.raises(ConfigError, match=r"lora_A.* but not .*lora_B"):
        PeftFolder(tmp_path, shape)
    save_file(whole, weights)
    config = tmp_path / "adapter_config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps({**settings, "r": None}))
    with pytest.raises(ConfigError, match="has no r: it is no LoRA adapter"):
        PeftFolder(tmp_path, shape)
    config.write_text(json.dumps(settings))
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="is not a PEFT folder"):
        PeftFolder(tmp_path, shape)


SETTINGS: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["o_proj"]}
ADAPTED = "base_model.model.model.layers.{}.self_attn.o_proj.lora_{}.weight"


def write_folder(folder: Path, settings: str, **changed: torch.Tensor) -> None:
    """An adapter of the tiny dense model's o_proj by hand; `changed` replaces the first layer's A or B."""
    tensors = {
        ADAPTED.format(layer, part): torch.ones((2, 128) if part == "A" else (64, 2))
        for layer in (0, 1)
        for part in "AB"
    }
    tensors |= {ADAPTED.format(0, part): tensor for part, tensor in changed.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(settings)


def check_folder(folder: Path, base: Path) -> None:
    lora = LoraConfig(rank=2, alpha=4, targets=("linear_proj",))
    PeftFolder(folder, ModelShape.from_folder(base)).check(lora)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"r": "2"}, "r in adapter_config.json cannot be '2'"),
        ({"r": 2.5}, "r in .* cannot be 2.5"),
        ({"r": -1}, "r in .* cannot be -1"),
        ({"r": 10**400}, "r in .* cannot be 1000"),
        ({"r": True}, "r in .* cannot be True"),
        ({"lora_alpha": [4]}, r"lora_alpha in .* cannot be \[4\]"),
        ({"lora_alpha": float("inf")}, "lora_alpha in .* cannot be inf"),
        ({"lora_alpha": 10**400}, "lora_alpha in .* cannot be 1000"),
        ({"lora_alpha": None}, "has no lora_alpha"),
        ({"peft_type": "LOHA"}, "peft_type = 'LOHA': only plain LoRA"),
        ({"peft_type": None}, "peft_type = None: only plain LoRA"),
        ({"use_rslora": "yes"}, "use_rslora in .* cannot be 'yes'"),
        ({"target_modules": 5}, "target_modules in .* cannot be 5"),
        ({"target_modules": [5]}, r"target_modules in .* cannot be \[5\]"),
        ({"rank_pattern": [2]}, r"rank_pattern in .* cannot be \[2\]"),
        ({"rank_pattern": {"o_proj": "2"}}, "rank_pattern in .* cannot be {'o_proj': '2'}"),
        ({"alpha_pattern": {"o_proj": None}}, "alpha_pattern in .* cannot be"),
        ({"alpha_pattern": {"(": 4}}, r"alpha_pattern in .*\(no regular expression"),
        ({"alora_invocation_tokens": [1]}, r"alora_invocation_tokens = \[1\]: only plain LoRA"),
    ],
)
def test_a_setting_that_peft_does_not_write_is_named(
    bases: dict[str, Path], tmp_path: Path, changed: dict, sentence: str
) -> None:
    write_folder(tmp_path, json.dumps(SETTINGS))
    check_folder(tmp_path, bases["dense"])
    write_folder(tmp_path, json.dumps(SETTINGS | changed))
    with pytest.raises(ConfigError, match=sentence) as caught:
        check_folder(tmp_path, bases["dense"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "5", "[" * 100_000, '{"a":' * 100_000, "{}", '{"r": 1' + "0" * 5000 + "}"])
def test_a_config_that_is_none_is_refused(bases: dict[str, Path], tmp_path: Path, text: str) -> None:
    write_folder(tmp_path, text)
    with pytest.raises(ConfigError, match=r"is not a PEFT folder with adapter_config\.json|only plain LoRA") as caught:
        check_folder(tmp_path, bases["dense"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"A": torch.full((2, 128), torch.nan)}, r"lora_A\.weight holds NaN or infinity"),
        ({"B": torch.full((64, 2), torch.inf)}, r"lora_B\.weight holds NaN or infinity"),
        ({"B": torch.ones((64, 2), dtype=torch.int32)}, r"lora_B\.weight is of type torch\.int32"),
        ({"A": torch.ones(64)}, r"lora_A\.weight \[64\] and B \[64, 2\], which are no matrices"),
        ({"A": torch.tensor(1.0)}, "no matrices"),
        ({"A": torch.ones(0, 128), "B": torch.ones(64, 0)}, "no matrices"),
        ({"B": torch.ones(64, 3)}, r"A\.weight \[2, 128\] and B \[64, 3\], which are no matrices"),
    ],
)
def test_a_tensor_that_is_no_a_or_b_is_named(
    bases: dict[str, Path], tmp_path: Path, changed: dict, sentence: str
) -> None:
    write_folder(tmp_path, json.dumps(SETTINGS), **changed)
    with pytest.raises(ConfigError, match=sentence) as caught:
        check_folder(tmp_path, bases["dense"])
    assert "\n" not in str(caught.value)
