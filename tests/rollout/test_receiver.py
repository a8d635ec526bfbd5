"""A worker's pieces agree with vLLM's own weight loaders, for every tensor-parallel rank, with repeated heads too."""

from __future__ import annotations

import pytest
import torch

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 16, 4, 2, 8, 24, 70


def check(name: str, layer: torch.nn.Module, tensors: dict[str, torch.Tensor], load) -> None:
    """Load with vLLM's loaders, then rebuild the parameter from the pieces and compare."""
    from rl_actors.weight_sync.vllm_shards import worker_modules
    from rl_actors.weight_sync.wire import window

    model = torch.nn.Module()
    parent = model
    *path, leaf = name.split(".")
    for part in path:
        parent.add_module(part, torch.nn.Module())
        parent = parent.get_submodule(part)
    parent.add_module(leaf, layer)
    layer.weight.data.fill_(torch.nan)
    load(layer.weight)
    (found,) = worker_modules(model)
    rebuilt = torch.full_like(layer.weight.data, torch.nan)
    for piece in found.pieces:
        assert piece.param == f"{name}.weight"
        window(rebuilt, piece.local).copy_(window(tensors[piece.box.name], piece.box.slices))
    assert not rebuilt.isnan().any()
    assert torch.equal(rebuilt, layer.weight.data)


def test_qkv(vllm_layers, place):
    prefix = "model.layers.0.self_attn"
    rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    tensors = {f"{prefix}.{part}_proj.weight": torch.randn(size, HIDDEN) for part, size in rows.items()}
    layer = vllm_layers.QKVParallelLinear(HIDDEN, HEAD_DIM, HEADS, KV_HEADS, bias=False)

    def load(weight: torch.nn.Parameter) -> None:
        for part in rows:
            weight.weight_loader(weight, tensors[f"{prefix}.{part}_proj.weight"], part)

    check(f"{prefix}.qkv_proj", layer, tensors, load)


def test_gate_up(vllm_layers, place):
    prefix = "model.layers.0.mlp"
    tensors = {f"{prefix}.{part}_proj.weight": torch.randn(FFN, HIDDEN) for part in ("gate", "up")}
    layer = vllm_layers.MergedColumnParallelLinear(HIDDEN, [FFN, FFN], bias=False)

    def load(weight: torch.nn.Parameter) -> None:
        for index, tensor in enumerate(tensors.values()):
            weight.weight_loader(weight, tensor, index)

    check(f"{prefix}.gate_up_proj", layer, tensors, load)


@pytest.mark.parametrize(("name", "width"), [("self_attn.o_proj", HEADS * HEAD_DIM), ("mlp.down_proj", FFN)])
def test_row_parallel(vllm_layers, place, name, width):
    name = f"model.layers.0.{name}"
    tensors = {f"{name}.weight": torch.randn(HIDDEN, width)}
    layer = vllm_layers.RowParallelLinear(width, HIDDEN, bias=False)
    check(name, layer, tensors, lambda weight: weight.weight_loader(weight, tensors[f"{name}.weight"]))
