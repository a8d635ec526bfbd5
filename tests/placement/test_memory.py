"""Estimates against published sizes and two measurements on one H200 (DESIGN figures of Qwen3-30B-A3B)."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from placement.layout import MegatronLayout
from placement.memory import (
    GIB,
    LOGIT_CHUNK_BYTES,
    adapter_parameters,
    estimate_memory,
    kv_bytes_per_token,
    trainer_parameters,
)
from placement.model_shape import ModelShape
from rl_actors.config_file import parse_config
from rl_actors.lora_config import LoraConfig
from rl_actors.trainer.logprobs import CHUNK_BYTES

QWEN3_30B = ModelShape(48, 2048, 32, 4, 128, 0, 768, 128, 8, 151936, False, moe_layers=48, qk_norm=True)
H100_GIB, H200_GIB = 79.0, 139.8


def _config(**sections):
    tree = {"run_dir": "runs/x", "model": {"path": "m"}, "data": {"train": "t.jsonl"}, **sections}
    return parse_config(tree, "test")


def test_the_weights_of_qwen3_30b_a3b_are_56_9_gib():
    engine = estimate_memory(_config(), QWEN3_30B, H200_GIB).engine
    assert engine.items["weights"] / GIB == pytest.approx(56.9, abs=0.05)


def test_an_engine_keeps_the_measured_kv_cache():
    """Measured: 725k tokens at 0.9 of an H200."""
    estimate = estimate_memory(_config(rollout={"gpu_memory_utilization": 0.9}), QWEN3_30B, H200_GIB)
    assert kv_bytes_per_token(QWEN3_30B, 1) == 96 * 1024
    assert estimate.kv_tokens == pytest.approx(725_000, rel=0.02)


def test_an_adapter_slot_takes_room_from_the_kv_cache():
    """vLLM's buffers for one expert: two A [32, 2048] and one [32, 768], two B [768, 32] and one [2048, 32]."""
    merged = estimate_memory(_config(lora={"rank": 24}), QWEN3_30B, H200_GIB)
    adapter = estimate_memory(_config(lora={"rank": 24}, sync={"mode": "adapter"}), QWEN3_30B, H200_GIB)
    expert = 32 * (2 * 2048 + 768 + 2 * 768 + 2048)
    attention = 32 * (3 * 2048 + 4096 + (4096 + 2 * 512) + 2048)
    slot = adapter.engine.items["adapter slot"]
    assert slot == 48 * (128 * expert + attention) * 2
    assert "adapter slot" not in merged.engine.items
    assert (merged.kv_tokens - adapter.kv_tokens) * 96 * 1024 == pytest.approx(slot, rel=1e-3)


def test_the_trainer_peaks_where_it_was_measured():
    """Measured: 30.7 GiB for 4 layers, 16 x 1024 tokens, full recompute, by a program that held all logits in bf16,
    in float32 and as a gradient; the allocator's peak has no CUDA context."""
    model = replace(QWEN3_30B, num_layers=4, moe_layers=4)
    trainer = {"micro_batch_tokens": 16 * 1024, "recompute": "full"}
    items = dict(estimate_memory(_config(trainer=trainer), model, H200_GIB).trainer.items)
    del items["CUDA and NCCL"], items["weight sync buffers"], items["backward of one layer"]
    all_logits = 16 * 1024 * 151_936 * (2 + 4 + 4)
    assert (sum(items.values()) + all_logits) / GIB == pytest.approx(30.7, rel=0.05)


def test_a_chunk_of_logits_is_what_the_trainer_takes():
    assert LOGIT_CHUNK_BYTES == 3 * CHUNK_BYTES


@pytest.mark.parametrize("sizes", itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4)))
@pytest.mark.parametrize("tied", [False, True])
def test_the_ranks_of_a_group_hold_the_model_once(sizes, tied):
    """Summed over the owners of each part, nothing is lost; what is copied is the norms, the router, a tied output."""
    tp, pp, ep = sizes
    model, layout = replace(QWEN3_30B, tied=tied), MegatronLayout(tp=tp, pp=pp, ep=ep)
    held = sum(trainer_parameters(model, layout, stage) for stage in range(pp))
    experts = 48 * 128 * model.expert_parameters
    cut = 48 * model.attention_parameters + model.vocab * model.hidden * (1 if tied else 2)
    copied = model.parameters - experts - cut
    output_copy = model.vocab * model.hidden // tp if tied and pp > 1 else 0
    assert held == experts // ep + cut // tp + copied + output_copy


def test_adapters_are_counted_one_per_expert():
    dense, experts = adapter_parameters(QWEN3_30B, MegatronLayout(ep=4), LoraConfig(rank=32))
    assert dense == 48 * 32 * ((2048 + 4096 + 1024) + (4096 + 2048))
    assert experts == 48 * 32 * (32 * ((2048 + 1536) + (768 + 2048)))
    shared = adapter_parameters(QWEN3_30B, MegatronLayout(ep=4), LoraConfig(rank=32, share_expert_adapters=True))
    assert shared == (dense, experts // 32)
    canonical = LoraConfig(rank=32, variant="canonical_lora")
    more_a = 48 * 32 * 2048  # for each further A that reads the hidden states: two in attention, one in an expert
    assert adapter_parameters(QWEN3_30B, MegatronLayout(ep=4), canonical) == (dense + 2 * more_a, experts + 32 * more_a)
    dora = LoraConfig(rank=32, variant="dora")
    lengths = 48 * (5120 + 2048), 48 * 32 * (1536 + 2048)
    assert adapter_parameters(QWEN3_30B, MegatronLayout(ep=4), dora) == (dense + lengths[0], experts + lengths[1])
    normalized = LoraConfig(rank=32, normalize_moe_lora=True)
    assert adapter_parameters(QWEN3_30B, MegatronLayout(ep=4), normalized) == (dense, experts // 8)
    only_qkv = LoraConfig(rank=32, targets=("*.layers.*.linear_qkv",))
    assert adapter_parameters(QWEN3_30B, MegatronLayout(tp=2), only_qkv) == (48 * 32 * (2048 + 5120) // 2, 0)


def test_the_target_fits_8_h100():
    """4 trainer GPUs with EP4, 4 engines."""
    config = _config(trainer={"ep": 4, "recompute": "full"}, rollout={"engines": 4})
    estimate = estimate_memory(config, QWEN3_30B, H100_GIB)
    assert estimate.ok and estimate.verdict == "fits on GPUs of 79 GiB"
    assert 15 < estimate.trainer.items["frozen base weights"] / GIB < 17
    assert estimate.kv_tokens > 16 * config.rollout.max_model_len
    assert "KV cache" in estimate.table() and "fits" not in estimate.table()


@pytest.mark.parametrize(
    ("sections", "gpu_gib", "sentence"),
    [
        (
            {"trainer": {"ep": 1}},
            H100_GIB,
            r"^does not fit on GPUs of 79 GiB:\n  - a trainer rank needs \d+\.\d GiB: raise trainer[^\n]*$",
        ),
        (
            {"trainer": {"ep": 8}},
            40.0,
            r"needs 59\.4 GiB before any KV cache and may take 34\.0 \(0\.85 of the GPU\): raise rollout\.tp",
        ),
        ({"rollout": {"kv_cache_gib": 60.0}, "trainer": {"ep": 8}}, H100_GIB, "room for 0 tokens .*raise rollout"),
        (
            {"placement": {"colocate": True}, "trainer": {"ep": 8, "recompute": "full"}, "rollout": {"tp": 2}},
            H100_GIB,
            r"a rank and an engine worker on one GPU need",
        ),
    ],
)
def test_what_does_not_fit_is_said_with_the_setting_to_change(sections, gpu_gib, sentence):
    estimate = estimate_memory(_config(**sections), QWEN3_30B, gpu_gib)
    assert not estimate.ok
    assert re.search(sentence, estimate.verdict), estimate.verdict


def test_colocation_fits_when_the_cache_is_bounded():
    config = _config(
        placement={"colocate": True},
        trainer={"ep": 8, "recompute": "full"},
        rollout={"tp": 2, "kv_cache_gib": 8.0},
    )
    assert estimate_memory(config, QWEN3_30B, H100_GIB).ok


def test_more_tokens_and_less_recompute_take_more():
    def activations(**trainer):
        return estimate_memory(_config(trainer={"ep": 4, **trainer}), QWEN3_30B, H100_GIB).trainer.items[
            "activations kept"
        ]

    full, selective, none = (activations(recompute=kind) for kind in ("full", "selective", "none"))
    assert full < selective < none
    assert activations(recompute="none", micro_batch_tokens=16384) == 2 * none
    assert activations(recompute="none", cp=2) == none // 2
