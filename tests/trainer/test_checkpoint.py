"""A run goes on from a checkpoint as if unbroken, at any layout, and Hugging Face sees the same adapted model.

Megatron's own ranks on CPU, in float32 unless said otherwise. Tolerance of losses and logprobs: 1e-5 between layouts.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoint_tasks as tasks
import numpy as np
import pytest
import torch
from rank_process import RankFailed, RankProcesses, with_layout
from tiny_models import huggingface_logprobs, make_batch, save_tiny_model

from placement.model_shape import ModelShape
from rl_actors.config import RunConfig
from rl_actors.preflight import check_init_from
from rl_actors.trainer import peft_adapter
from rl_actors.trainer.export import export_merged
from rl_actors.trainer.pool import merge_logprobs
from rl_actors.trainer.shard_files import KINDS, ShardReader, TrainerState
from rl_actors.types import TrainBatch

TEMPERATURE = 0.7
FOUR = {"tp": 2, "pp": 2, "ep": 2}  # four ranks, no data parallelism: the plain optimizer
LAYOUTS: dict[str, dict[str, int]] = {
    "one rank": {},
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "pp2": {"pp": 2},
    "ep2": {"ep": 2},  # the distributed optimizer for dense parameters, a group of one for experts
    "ep4": {"ep": 4},
    "dp2": {"replicas": 2},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "tp2 ep2": {"tp": 2, "ep": 2},
    "pp2 ep2": {"pp": 2, "ep": 2},
    "dp2 tp2": {"replicas": 2, "tp": 2},
    "tp2 pp2 ep2": FOUR,
}


def config_for(base: Path, dtype: str = "float32", **lora: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_dir": "unused",
            "model": {"path": str(base), "dtype": dtype},
            "data": {"train": "unused"},
            "lora": {"rank": 4, "alpha": 8, **lora},
            "trainer": {"micro_batch_tokens": 64, "optimizer": {"lr": 5e-3, "schedule": "cosine", "warmup_steps": 1}},
            "rollout": {"temperature": TEMPERATURE},
            "pipeline": {"steps": 6},
        }
    )


class Saved:
    """A base model, a checkpoint made after two steps, and how that run went on."""

    def __init__(self, ranks: RankProcesses, folder: Path, arch: str, layout: dict[str, int], **config: Any) -> None:
        self.base = save_tiny_model(folder / "base", arch, heads=8, kv_heads=4)
        batch = make_batch()
        self.batch = replace(batch, old_logprobs=huggingface_logprobs(self.base, batch, TEMPERATURE))
        self.config = config_for(self.base, **config)
        self.folder = folder / "step-000002"
        answers = ranks.run(tasks.train_and_save, with_layout(self.config, **layout), self.batch, str(self.folder), 2)
        self.layout, self.unbroken = layout, Run(self.batch, answers)


class Run:
    """What `tasks.go_on` gave, put together."""

    def __init__(self, batch: TrainBatch, answers: list[dict[str, Any]]) -> None:
        self.logprobs = merge_logprobs(batch, [answer["logprobs"] for answer in answers])
        self.after = merge_logprobs(batch, [answer["after"] for answer in answers])
        self.losses, self.norms, self.steps = answers[0]["losses"], answers[0]["norms"], answers[0]["steps"]
        self.rng = [answer["rng"] for answer in answers]

    def assert_goes_on_as(self, other: Run) -> None:
        assert self.steps == other.steps == 2
        np.testing.assert_allclose(self.logprobs, other.logprobs, atol=1e-5, rtol=0)
        np.testing.assert_allclose(self.losses, other.losses, atol=1e-5, rtol=0)
        np.testing.assert_allclose(self.norms, other.norms, rtol=1e-4)
        np.testing.assert_allclose(self.after, other.after, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def moe(rank_processes: RankProcesses, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(rank_processes, tmp_path_factory.mktemp("moe"), "moe", FOUR)


@pytest.fixture(scope="module")
def dense(rank_processes: RankProcesses, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(rank_processes, tmp_path_factory.mktemp("dense"), "dense", {"tp": 2, "replicas": 2})


@pytest.fixture(scope="module")
def moe_of_replicas(rank_processes: RankProcesses, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(rank_processes, tmp_path_factory.mktemp("moe of replicas"), "moe", LAYOUTS["dp2"])


# Whole tensors are read from what was written, then cut: what the distributed optimizer wrote needs no other layouts.
RESUMED = [
    *[("moe", layout) for layout in LAYOUTS],
    *[("moe_of_replicas", layout) for layout in ("one rank", "dp2", "ep2", "dp2 tp2", "tp2 pp2 ep2")],
]


@pytest.mark.parametrize(("written_at", "layout"), RESUMED)
def test_losses_go_on_unbroken_at_any_layout(
    request: pytest.FixtureRequest, rank_processes: RankProcesses, written_at: str, layout: str
) -> None:
    saved: Saved = request.getfixturevalue(written_at)
    config = with_layout(saved.config, **LAYOUTS[layout])
    answers = rank_processes.run(tasks.load_and_go_on, config, saved.batch, str(saved.folder))
    resumed = Run(saved.batch, answers)
    resumed.assert_goes_on_as(saved.unbroken)
    # Generators are restored at the same layout only.
    restored = [found == left for found, left in zip(resumed.rng, saved.unbroken.rng, strict=False)]
    assert all(restored) if LAYOUTS[layout] == saved.layout else not any(restored)


def test_losses_go_on_from_the_distributed_optimizer(rank_processes: RankProcesses, dense: Saved) -> None:
    answers = rank_processes.run(tasks.load_and_go_on, dense.config, dense.batch, str(dense.folder))
    Run(dense.batch, answers).assert_goes_on_as(dense.unbroken)


def test_a_load_replaces_what_the_worker_had_trained(rank_processes: RankProcesses, dense: Saved) -> None:
    answers = rank_processes.run(tasks.load_and_go_on, dense.config, dense.batch, str(dense.folder), 3)
    Run(dense.batch, answers).assert_goes_on_as(dense.unbroken)


@pytest.mark.parametrize("layout", ["ep2", "tp2"])
def test_nothing_is_lost_or_written_twice(
    rank_processes: RankProcesses, moe: Saved, tmp_path: Path, layout: str
) -> None:
    again = tmp_path / "again"
    rank_processes.run(tasks.load_and_save, with_layout(moe.config, **LAYOUTS[layout]), str(moe.folder), str(again))
    first, second = ShardReader(moe.folder), ShardReader(again)  # refuse elements that are absent or there twice
    assert first.state.adapters == second.state.adapters
    assert len(first.state.adapters) == 2 * (2 + 2 * 4)
    for name in first.state.adapters:
        for part in ("A", "B"):
            for kind in KINDS:
                assert torch.equal(first.full(name, part, kind), second.full(name, part, kind)), (name, part, kind)


def test_a_snapshot_is_what_was_there_when_it_was_taken(
    rank_processes: RankProcesses, dense: Saved, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    config = with_layout(dense.config, tp=2, replicas=2)
    rank_processes.run(tasks.write_while_training, config, dense.batch, str(first), str(second))
    files = sorted(path.relative_to(first) for path in (first / "trainer").iterdir())
    assert len(files) == 4 + 4 + 1
    for name in files:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_before_the_first_step(rank_processes: RankProcesses, moe: Saved, tmp_path: Path) -> None:
    config = with_layout(moe.config, ep=2)
    start = rank_processes.run(tasks.train_and_save, config, moe.batch, str(tmp_path), 0)
    loaded = rank_processes.run(tasks.load_and_go_on, moe.config, moe.batch, str(tmp_path), 1)
    first, second = Run(moe.batch, start), Run(moe.batch, loaded)
    assert first.steps == second.steps == 0
    np.testing.assert_allclose(first.losses, second.losses, atol=1e-5, rtol=0)


def test_bfloat16_parameters_come_from_their_float32_masters(rank_processes: RankProcesses, tmp_path: Path) -> None:
    saved = Saved(rank_processes, tmp_path, "dense", {"replicas": 2}, dtype="bfloat16")
    reader = ShardReader(saved.folder)
    master = reader.full("layers.0.self_attention.linear_qkv", "A")
    assert not torch.equal(master, master.bfloat16().float())  # finer than the parameter
    for layout in ({}, {"tp": 2}, {"replicas": 2}):
        for worst, seen in rank_processes.run(
            tasks.load_and_compare, with_layout(saved.config, **layout), saved.batch, str(saved.folder)
        ):
            assert seen > 0
            assert worst == 0.0
    rank_processes.run(tasks.load_and_save, with_layout(saved.config, tp=2), str(saved.folder), str(tmp_path / "again"))
    assert torch.equal(ShardReader(tmp_path / "again").full("layers.0.self_attention.linear_qkv", "A"), master)


@pytest.mark.parametrize("arch", ["dense", "moe"])
def test_hugging_face_sees_the_trained_model(request: pytest.FixtureRequest, tmp_path: Path, arch: str) -> None:
    import peft
    import transformers

    saved: Saved = request.getfixturevalue(arch)
    trainer = saved.unbroken.logprobs
    assert np.abs(trainer - saved.batch.old_logprobs).max() > 0.01  # training has moved the model

    export_merged(saved.base, saved.folder, tmp_path / "merged")
    merged = huggingface_logprobs(tmp_path / "merged", saved.batch, TEMPERATURE)
    np.testing.assert_allclose(merged, trainer, atol=1e-4, rtol=0)

    model = transformers.AutoModelForCausalLM.from_pretrained(saved.base, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(model, saved.folder / "adapter").merge_and_unload()
    adapted.save_pretrained(tmp_path / "peft")
    by_peft = huggingface_logprobs(tmp_path / "peft", saved.batch, TEMPERATURE)
    np.testing.assert_allclose(by_peft, trainer, atol=1e-4, rtol=0)


def test_adapters_that_peft_cannot_hold_are_saved_all_the_same(moe: Saved, tmp_path: Path) -> None:
    shutil.copytree(moe.folder / "trainer", tmp_path / "trainer")
    state = TrainerState.read(tmp_path)
    unknown = {"layers.0.mlp.shared_experts.linear_fc1": state.adapters["layers.0.mlp.experts.0.linear_fc1"]}
    replace(state, adapters=state.adapters | unknown).write(tmp_path)
    assert list(peft_adapter.write_beside(tmp_path)) == ["adapter-not-written.txt"]
    assert "layers.0.mlp.shared_experts.linear_fc1" in (tmp_path / "adapter-not-written.txt").read_text()
    assert not (tmp_path / "adapter").exists()


def test_a_run_starts_from_the_peft_folder_of_a_checkpoint(rank_processes: RankProcesses, moe: Saved) -> None:
    lora = moe.config.lora.model_copy(update={"init_from": str(moe.folder / "adapter")})
    config = with_layout(moe.config.model_copy(update={"lora": lora}), ep=2)
    check_init_from(lora, ModelShape.from_folder(moe.base))
    answers = rank_processes.run(tasks.first_look, config, moe.batch)
    started = merge_logprobs(moe.batch, [answer["logprobs"] for answer in answers])
    np.testing.assert_allclose(started, moe.unbroken.logprobs, atol=1e-5, rtol=0)
    assert answers[0]["steps"] == 1  # a new run: the optimizer starts anew


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 8}, "lora.rank is 4 in the checkpoint and 8 in this run"),
        ({"alpha": 16}, "lora.alpha is 8 in the checkpoint and 16 in this run"),
        ({"targets": ["linear_qkv"]}, "lora.targets is .* in the checkpoint and .*linear_qkv.* in this run"),
    ],
    ids=["rank", "alpha", "targets"],
)
def test_other_adapters_are_refused(
    rank_processes: RankProcesses, dense: Saved, lora: dict[str, Any], message: str
) -> None:
    config = config_for(dense.base, **lora)
    with pytest.raises(RankFailed, match="CheckpointError: .*" + message):
        rank_processes.run(tasks.load_and_go_on, config, dense.batch, str(dense.folder))


def test_another_model_is_refused(rank_processes: RankProcesses, dense: Saved, moe: Saved, tmp_path: Path) -> None:
    deeper = save_tiny_model(tmp_path / "deeper", "dense", layers=4)
    for base, message in ((deeper, "num_layers = 2 in the checkpoint and 4"), (moe.base, "experts = 0 .* and 4")):
        with pytest.raises(RankFailed, match="CheckpointError: .*" + message):
            rank_processes.run(tasks.load_and_go_on, config_for(base), dense.batch, str(dense.folder))


def test_state_says_what_was_trained(moe: Saved) -> None:
    state = TrainerState.read(moe.folder)
    assert (state.steps, state.ranks, state.dtype, state.base) == (2, 4, "float32", str(moe.base))
    assert state.layout == {"tp": 2, "pp": 2, "cp": 1, "ep": 2, "etp": 1, "replicas": 1}
    assert state.adapters["layers.1.mlp.experts.3.linear_fc1"] == {"A": [4, 64], "B": [96, 4], "scale": 2.0}
