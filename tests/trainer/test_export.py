"""A checkpoint's adapters reach Hugging Face whole: PEFT folder and merged model against a plain fp32 oracle.

The checkpoint is written here, cut as three ranks of an uneven layout would cut it; tests/trainer/test_checkpoint.py
does the same with Megatron's own ranks.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny_models import VOCAB, save_tiny_model

from placement.model_shape import ModelShape
from rl_actors.errors import CheckpointError, ConfigError
from rl_actors.lora_config import FUSED_PARTS, LoraConfig
from rl_actors.trainer.export import export_merged, export_peft
from rl_actors.trainer.safetensors_stream import SafetensorsWriter
from rl_actors.trainer.shard_files import Cut, OwnedPiece, ShardReader, TrainerState, rank_file, write_rank_file

RANK, ALPHA = 4, 8
TOKENS = torch.arange(40).view(2, 20) * 7 % VOCAB


def adapters_of(shape: ModelShape, variant: str = "lora") -> dict[str, tuple[int, int]]:
    """(out, in) of every adapter of the model."""
    if variant == "canonical_lora":
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        found = {}
        for name, (out, width) in adapters_of(shape).items():
            block, _, linear = name.rpartition(".")
            heights = {"linear_qkv": (query, key, key), "linear_fc1": (out // 2, out // 2)}.get(linear, (out,))
            parts = zip(FUSED_PARTS.get(linear, (linear,)), heights, strict=True)
            found |= {f"{block}.{part}": (height, width) for part, height in parts}
        return found
    found: dict[str, tuple[int, int]] = {}
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    for layer in range(shape.num_layers):
        found[f"layers.{layer}.self_attention.linear_qkv"] = (qkv, shape.hidden)
        found[f"layers.{layer}.self_attention.linear_proj"] = (shape.hidden, shape.heads * shape.head_dim)
        blocks = [f"experts.{e}." for e in range(shape.experts)] or [""]
        for block in blocks:
            ffn = shape.moe_ffn or shape.ffn
            found[f"layers.{layer}.mlp.{block}linear_fc1"] = (2 * ffn, shape.hidden)
            found[f"layers.{layer}.mlp.{block}linear_fc2"] = (shape.hidden, ffn)
    return found


def write_checkpoint(
    folder: Path, base: Path, keep: str = "", dtype: str = "float32", expert_rank: int = RANK, **lora: str
) -> dict[str, torch.Tensor]:
    """Random adapters of every linear whose name contains `keep`; returns full tensors by `name.A`, `.B` and `.M`."""
    shape = ModelShape.from_folder(base)
    torch.manual_seed(0)
    full: dict[str, torch.Tensor] = {}
    entries, pieces = {}, [[], [], []]
    config = LoraConfig(rank=RANK, alpha=ALPHA, **lora)
    for name, (out, width) in adapters_of(shape, config.variant).items():
        if keep not in name:
            continue
        rank = expert_rank if ".experts." in name else RANK
        a, b = torch.randn(rank, width) * 0.1, torch.randn(out, rank) * 0.1
        full[f"{name}.A"], full[f"{name}.B"] = a, b
        scale = ALPHA / (math.sqrt(rank) if config.scaling == "rslora" else rank)
        entries[name] = {"A": list(a.shape), "B": list(b.shape), "scale": scale}
        gated = name.endswith("linear_fc1")
        by_input = name.endswith(("linear_proj", "linear_fc2"))
        cuts = [("A", a, int(by_input), False), ("B", b, 0, gated)]
        if config.variant == "dora":
            full[f"{name}.M"] = torch.rand(out, 1) + 1
            entries[name]["M"] = [out, 1]
            cuts.append(("M", full[f"{name}.M"], 0, gated))
        for part, tensor, axis, halves in cuts:
            for tp in range(2):
                split = tensor.chunk(2, dim=axis) if halves else (tensor,)
                shard = torch.cat([half.chunk(2, dim=axis)[tp] for half in split], dim=axis).flatten()
                # The distributed optimizer cuts anywhere: here an odd third of the second shard is another rank's.
                edges = [0, shard.numel()] if tp == 0 else [0, shard.numel() // 3, shard.numel()]
                for index, (start, stop) in enumerate(pairwise(edges)):
                    cut = Cut(tuple(tensor.shape), axis, tp, 2, halves, start, stop)
                    pieces[tp + index].append(OwnedPiece(name, part, cut, {"weight": shard[start:stop]}))
    (folder / "trainer").mkdir(parents=True)
    for index, own in enumerate(pieces):
        write_rank_file(folder, index, own)
    TrainerState(str(base), dtype, config, shape, 3, {"ep": 1}, entries, ranks=3).write(folder)
    return full


def oracle_logits(base: Path, full: dict[str, torch.Tensor], scaling: str = "standard") -> torch.Tensor:
    """Logits of the base with the adapters merged by hand into transformers' own parameters."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    shape = ModelShape.from_folder(base)
    with torch.no_grad():
        for name in sorted({key[:-2] for key in full}):
            a, b = full[f"{name}.A"], full[f"{name}.B"]
            delta = ALPHA / (math.sqrt(a.shape[0]) if scaling == "rslora" else a.shape[0]) * b @ a
            rows = torch.arange(len(delta))
            for weight, own in adapted_weights(model.model.layers[int(name.split(".")[1])], name, rows, shape):
                weight += delta[own]
                if f"{name}.M" in full:
                    weight *= full[f"{name}.M"][own] / weight.norm(dim=1, keepdim=True)
        return model(TOKENS).logits


def adapted_weights(
    layer: torch.nn.Module, name: str, rows: torch.Tensor, shape: ModelShape
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """transformers' weights that an adapter changes, each with the adapter's rows for it."""
    linear, half = name.rpartition(".")[2], len(rows) // 2
    groups = rows.view(shape.kv_heads, -1, shape.head_dim) if linear == "linear_qkv" else rows[None, None]
    attention = layer.self_attn
    if ".experts." in name:
        expert = int(name.split(".")[-2])
        fused = layer.mlp.experts.gate_up_proj[expert], layer.mlp.experts.down_proj[expert]
        gate, up, down = *fused[0].chunk(2), fused[1]
    elif ".mlp." in name:
        gate, up, down = layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight, layer.mlp.down_proj.weight
    return {
        "linear_qkv": lambda: [
            (attention.q_proj.weight, groups[:, :-2].flatten()),
            (attention.k_proj.weight, groups[:, -2].flatten()),
            (attention.v_proj.weight, groups[:, -1].flatten()),
        ],
        "linear_q": lambda: [(attention.q_proj.weight, rows)],
        "linear_k": lambda: [(attention.k_proj.weight, rows)],
        "linear_v": lambda: [(attention.v_proj.weight, rows)],
        "linear_proj": lambda: [(attention.o_proj.weight, rows)],
        "linear_fc1": lambda: [(gate, rows[:half]), (up, rows[half:])],
        "linear_fc1_gate": lambda: [(gate, rows)],
        "linear_fc1_up": lambda: [(up, rows)],
        "linear_fc2": lambda: [(down, rows)],
    }[linear]()


def logits_of(folder: Path) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(TOKENS).logits


def peft_logits(base: Path, adapter: Path) -> torch.Tensor:
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


@pytest.fixture(scope="module", params=["dense", "moe"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp(request.param) / "base", request.param)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("moe") / "base", "moe")


def test_merged_model_is_base_plus_scaled_product(base: Path, tmp_path: Path) -> None:
    full = write_checkpoint(tmp_path / "step", base)
    expected = oracle_logits(base, full)
    assert (expected - logits_of(base)).abs().max() > 0.5  # the adapters matter
    export_merged(base, tmp_path / "step", tmp_path / "merged")
    torch.testing.assert_close(logits_of(tmp_path / "merged"), expected, atol=1e-4, rtol=0)


def test_peft_folder_equals_merging_by_hand(base: Path, tmp_path: Path) -> None:
    full = write_checkpoint(tmp_path / "step", base)
    export_peft(tmp_path / "step", tmp_path / "adapter")
    torch.testing.assert_close(peft_logits(base, tmp_path / "adapter"), oracle_logits(base, full), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "lora",
    [{"variant": "canonical_lora"}, {"variant": "dora"}, {"variant": "canonical_lora", "scaling": "rslora"}],
    ids=["canonical", "dora", "canonical rslora"],
)
def test_variants_are_merged_and_reach_peft(base: Path, tmp_path: Path, lora: dict[str, str]) -> None:
    full = write_checkpoint(tmp_path / "step", base, **lora)
    expected = oracle_logits(base, full, lora.get("scaling", "standard"))
    export_merged(base, tmp_path / "step", tmp_path / "merged")
    torch.testing.assert_close(logits_of(tmp_path / "merged"), expected, atol=1e-4, rtol=0)
    if lora["variant"] == "dora" and ModelShape.from_folder(base).is_moe:
        with pytest.raises(CheckpointError, match="PEFT has no DoRA for experts; export the merged model"):
            export_peft(tmp_path / "step", tmp_path / "adapter")
        return
    export_peft(tmp_path / "step", tmp_path / "adapter")
    torch.testing.assert_close(peft_logits(base, tmp_path / "adapter"), expected, atol=1e-4, rtol=0)


def test_peft_folder_of_up_alone(moe: Path, tmp_path: Path) -> None:
    full = write_checkpoint(tmp_path / "step", moe, "linear_fc1_up", variant="canonical_lora")
    export_peft(tmp_path / "step", tmp_path / "adapter")
    torch.testing.assert_close(peft_logits(moe, tmp_path / "adapter"), oracle_logits(moe, full), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("keep", "expert_rank"),
    [("linear_fc1", RANK), ("linear_fc2", RANK), ("layers.1.", RANK), ("experts.2.", RANK), ("", 2)],
    ids=["only fc1", "only fc2", "one layer", "one expert", "smaller expert rank"],
)
def test_peft_folder_of_a_part_of_an_moe_model(moe: Path, tmp_path: Path, keep: str, expert_rank: int) -> None:
    full = write_checkpoint(tmp_path / "step", moe, keep, expert_rank=expert_rank)
    export_peft(tmp_path / "step", tmp_path / "adapter")
    torch.testing.assert_close(peft_logits(moe, tmp_path / "adapter"), oracle_logits(moe, full), atol=1e-4, rtol=0)


def test_merged_model_keeps_the_bases_files_types_and_shards(moe: Path, tmp_path: Path) -> None:
    import transformers

    base = tmp_path / "base"
    model = transformers.AutoModelForCausalLM.from_pretrained(moe, dtype=torch.bfloat16)
    model.save_pretrained(base, max_shard_size="200KB")
    (base / "tokenizer.json").write_text("{}")
    full = write_checkpoint(tmp_path / "step", base, "linear_proj", dtype="bfloat16")
    seen: list[tuple[int, int]] = []
    export_merged(base, tmp_path / "step", tmp_path / "merged", lambda done, total: seen.append((done, total)))

    shards = sorted(base.glob("*.safetensors"))
    assert len(shards) > 1
    assert sorted(p.name for p in base.iterdir()) == sorted(p.name for p in (tmp_path / "merged").iterdir())
    assert seen[-1][0] == seen[-1][1] == len(seen)
    for path in shards:
        with safe_open(path, "pt") as old, safe_open(tmp_path / "merged" / path.name, "pt") as new:
            assert set(old.keys()) == set(new.keys())
            for name in old.keys():  # noqa: SIM118
                before, after = old.get_tensor(name), new.get_tensor(name)
                if not name.endswith("o_proj.weight"):
                    assert torch.equal(before, after)
                    continue
                key = f"layers.{name.split('.')[2]}.self_attention.linear_proj"
                merged = before.float() + ALPHA / RANK * full[f"{key}.B"] @ full[f"{key}.A"]
                # One rounding of the fp32 sum; a cast in between would differ in many elements.
                assert (after != merged.bfloat16()).float().mean() < 1e-3


def test_a_failed_export_leaves_nothing(base: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "step", base)
    path = rank_file(tmp_path / "step", 1)
    path.write_bytes(path.read_bytes()[:-2000])
    for export in (
        lambda: export_peft(tmp_path / "step", tmp_path / "out"),
        lambda: export_merged(base, tmp_path / "step", tmp_path / "out"),
    ):
        with pytest.raises(CheckpointError, match="rank-00001"):
            export()
    assert [p.name for p in tmp_path.iterdir()] == ["step"]


def test_missing_pieces_are_named(moe: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "step", moe, "linear_proj")
    write_rank_file(tmp_path / "step", 2, [])
    with pytest.raises(CheckpointError, match=r"holds \d+ of the \d+ elements of layers\.0\..*\.A"):
        ShardReader(tmp_path / "step").full("layers.0.self_attention.linear_proj", "A")
    rank_file(tmp_path / "step", 2).unlink()
    with pytest.raises(CheckpointError, match="lacks trainer/rank-00002"):
        ShardReader(tmp_path / "step")


def test_another_base_is_refused(moe: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "step", moe)
    other = save_tiny_model(tmp_path / "dense", "dense")
    with pytest.raises(CheckpointError, match="another model"):
        export_merged(other, tmp_path / "step", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"config\.json"):
        export_merged(tmp_path, tmp_path / "step", tmp_path / "out")


def test_export_command(moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from jobs.export import main
    from rl_actors.driver.checkpoint_store import CheckpointStore

    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    write_checkpoint(store.begin(3) / "x", moe)
    writing = store.folder / ".writing-step-000003"
    (writing / "x" / "trainer").rename(writing / "trainer")
    store.commit(3)
    arguments = [str(store.folder), "--format", "merged-hf", "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    assert (tmp_path / "out" / "config.json").is_file()
    at_uri = [f"file://{store.folder}", "--format", "peft", "--out", str(tmp_path / "from uri")]
    assert main(at_uri) == 0
    assert (tmp_path / "from uri" / "adapter_config.json").is_file()
    assert main(["file:///nowhere/step-000001", *at_uri[1:3], "--out", str(tmp_path / "x")]) == 2
    assert "checkpoint file:///nowhere/step-000001 cannot be fetched" in capsys.readouterr().err
    assert main(arguments) == 2
    assert "exists already" in capsys.readouterr().err

    state = store.folder / "step-000003" / "trainer" / "state.json"
    state.write_text(json.dumps({"format": 99}))
    assert main([str(store.folder / "step-000003"), "--format", "peft", "--out", str(tmp_path / "peft")]) == 2
    error = capsys.readouterr().err
    assert "trainer/state.json" in error and error.count("\n") == 1
    assert main([str(tmp_path / "nowhere"), "--format", "peft", "--out", str(tmp_path / "peft")]) == 2
    assert not (tmp_path / "peft").exists()


def test_streaming_writer_refuses_other_tensors_than_announced(tmp_path: Path) -> None:
    layout = {"a": (torch.float32, (2, 3)), "b": (torch.bfloat16, (4,))}
    with SafetensorsWriter(tmp_path / "x.safetensors", layout) as file:
        file.write("a", torch.ones(2, 3))
        file.write("b", torch.ones(4))
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.get_tensor("b").dtype == torch.bfloat16
    with pytest.raises(ValueError, match="not written"), SafetensorsWriter(tmp_path / "x.safetensors", layout) as file:
        file.write("a", torch.ones(2, 3))
    with pytest.raises(ValueError, match="announced"), SafetensorsWriter(tmp_path / "x.safetensors", layout) as file:
        file.write("b", torch.ones(4))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"format": 2}, "has another format than 1"),
        ({"format": None}, "has another format than 1"),
        ({"ranks": "many"}, "damaged: ranks: Input should be a valid integer"),
        ({"adapters": 5}, "damaged: Input should be a valid dictionary"),
        ({"adapters": {"layers.0.mlp.linear_fc1": {"A": [1, 1], "B": 5, "scale": 1}}}, r"damaged: .*linear_fc1\.B"),
        ({"model": []}, "damaged: model"),
        ({"lora": {"rank": -1}}, r"damaged: lora\.rank"),
        ({"dtype": "float9"}, "damaged: dtype"),
    ],
)
def test_a_state_that_is_none_is_named(tmp_path: Path, changed: dict, sentence: str) -> None:
    model = ModelShape(2, 8, 2, 1, 4, 16, 0, 0, 0, 9, False)
    state = TrainerState("base", "float32", LoraConfig(), model, 1, {}, {}, 0)
    (tmp_path / "trainer").mkdir()
    state.write(tmp_path)
    assert TrainerState.read(tmp_path) == state
    path = tmp_path / "trainer" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(CheckpointError, match=sentence) as caught:
        TrainerState.read(tmp_path)
    assert "\n" not in str(caught.value)
