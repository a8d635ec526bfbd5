"""A slot filled through our pieces holds what vLLM's own `set_lora` puts there, for every tensor-parallel rank."""

from __future__ import annotations

import pytest
import torch

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, EXPERTS, TOP_K = 16, 4, 2, 8, 32, 3, 2
RANK, SLOT_RANK = 4, 8
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def lora_layer(layer: torch.nn.Module, packed: list[str]) -> torch.nn.Module:
    """vLLM's LoRA layer over one of its layers, with two slots."""
    from vllm.config.lora import LoRAConfig
    from vllm.lora.utils import from_layer

    settings = LoRAConfig(max_lora_rank=SLOT_RANK, max_loras=2, lora_dtype=torch.float32)
    wrapped = from_layer(layer, 2, settings, packed, None)
    assert wrapped is not layer
    return wrapped


def stacked_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{name}[{index}]": tensor
        for name, value in vars(module).items()
        if name.endswith("_stacked") and isinstance(value, tuple)
        for index, tensor in enumerate(value)
    }


def check(name: str, module: torch.nn.Module, tensors: dict[str, torch.Tensor], set_lora, **settings) -> None:
    """Slot 1 by our pieces against slot 0 by vLLM."""
    from rl_actors.weight_sync.lora_slot import slot_module
    from rl_actors.weight_sync.wire import window

    set_lora(module)
    ours = slot_module(name, module, 1, RANK, settings.get("normalize_experts", False), PACKED)
    for piece in ours.pieces:
        leaf = piece.param.removeprefix(f"{name}.")
        value = window(tensors[piece.box.name], piece.box.slices)
        target = window(ours.tensor(leaf), piece.local)
        target.copy_(value.view(target.shape))
    assert ours.finish(None) is False
    stacked = stacked_of(module)
    assert stacked
    for which, tensor in stacked.items():
        assert tensor[0].any(), which
        assert torch.equal(tensor[1], tensor[0]), which


def factors(prefix: str, sizes: dict[str, int], width: int, rank: int = RANK) -> dict[str, torch.Tensor]:
    """One A for all linears, a B for each, by PEFT's names."""
    a = torch.randn(rank, width)
    made = {f"{prefix}.{part}.lora_A.weight": a for part in sizes}
    return made | {f"{prefix}.{part}.lora_B.weight": torch.randn(size, rank) for part, size in sizes.items()}


def in_order(tensors: dict[str, torch.Tensor], factor: str) -> list[torch.Tensor]:
    return [tensor for name, tensor in tensors.items() if f".lora_{factor}." in name]


def test_qkv(vllm_layers, place):
    prefix = "model.layers.0.self_attn"
    sizes = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
    tensors = factors(prefix, sizes, HIDDEN)
    layer = vllm_layers.QKVParallelLinear(HIDDEN, HEAD_DIM, HEADS, KV_HEADS, bias=False)
    module = lora_layer(layer, PACKED["qkv_proj"])
    load = (0, in_order(tensors, "A"), in_order(tensors, "B"))
    check(f"{prefix}.qkv_proj", module, tensors, lambda one: one.set_lora(*load))


def test_gate_up(vllm_layers, place):
    prefix = "model.layers.0.mlp"
    tensors = factors(prefix, {"gate_proj": FFN, "up_proj": FFN}, HIDDEN)
    module = lora_layer(vllm_layers.MergedColumnParallelLinear(HIDDEN, [FFN, FFN], bias=False), PACKED["gate_up_proj"])
    load = (0, in_order(tensors, "A"), in_order(tensors, "B"))
    check(f"{prefix}.gate_up_proj", module, tensors, lambda one: one.set_lora(*load))


@pytest.mark.parametrize(("linear", "width"), [("self_attn.o_proj", HEADS * HEAD_DIM), ("mlp.down_proj", FFN)])
def test_row_parallel(vllm_layers, place, linear, width):
    prefix, _, leaf = f"model.layers.0.{linear}".rpartition(".")
    tensors = factors(prefix, {leaf: HIDDEN}, width)
    module = lora_layer(vllm_layers.RowParallelLinear(width, HIDDEN, bias=False), [])
    load = (0, *in_order(tensors, "A"), *in_order(tensors, "B"))
    check(f"{prefix}.{leaf}", module, tensors, lambda one: one.set_lora(*load))


@pytest.mark.parametrize("normalize", [False, True], ids=["same-rank", "rank-by-top-k"])
def test_experts(vllm_layers, place, normalize):
    from vllm.model_executor.layers.fused_moe import FusedMoE

    from rl_actors.rollout.cpu_experts import lend_expert_lora

    lend_expert_lora()
    rank = RANK // TOP_K if normalize else RANK
    prefix = f"model.layers.{place[0]}{place[1]}{normalize:d}.mlp.experts"
    runner = FusedMoE(EXPERTS, TOP_K, HIDDEN, FFN, tp_size=place[0], prefix=prefix, params_dtype=torch.float32)
    module = lora_layer(runner, ["w1", "w3"])
    tensors: dict[str, torch.Tensor] = {}
    for expert in range(EXPERTS):
        tensors |= factors(f"{prefix}.{expert}", {"gate_proj": FFN, "up_proj": FFN}, HIDDEN, rank)
        tensors |= factors(f"{prefix}.{expert}", {"down_proj": HIDDEN}, FFN, rank)

    def stacked(factor: str) -> list[torch.Tensor]:
        return [
            torch.stack([tensors[f"{prefix}.{expert}.{part}.lora_{factor}.weight"] for expert in range(EXPERTS)])
            for part in ("gate_proj", "down_proj", "up_proj")
        ]

    check(
        prefix,
        module,
        tensors,
        lambda one: one.set_lora(0, stacked("A"), stacked("B")),
        normalize_experts=normalize,
    )
