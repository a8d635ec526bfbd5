"""The pipeline on real pools: what it computes is what a plain loop computes, and it really overlaps."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rl_actors.algorithms.batching import make_train_batch
from rl_actors.config import RunConfig
from rl_actors.data.order import PromptOrder
from rl_actors.driver.checkpoint_store import CheckpointStore
from rl_actors.driver.training_loop import TrainingLoop, group_seed
from rl_actors.errors import CheckpointError
from rl_actors.tracking.records import StepRecord, read_metrics
from rl_actors.tracking.stage_times import stage_seconds
from rl_actors.tracking.trace import overlaps, read_trace
from rl_actors.tracking.tracker import Tracker
from rl_actors.types import TrajectoryGroup
from tests.driver.length_reward import shorter_is_better
from tests.driver.live_pools import STEPS, LivePools, make_config

TOLERANCE = 1e-6


async def train(live: LivePools, config: RunConfig, checkpoint: Path | None = None) -> list[StepRecord]:
    """The training loop as the driver actor runs it, on the shared pools."""
    store = CheckpointStore(config.run_path / "checkpoints", config.checkpoint.keep_last)
    tracker = Tracker(config, config.run_path, store.step_of(checkpoint) if checkpoint else None)
    loop = TrainingLoop(config, live.pools, tracker, store, live.prepared.train_prompts, [])
    records = [record async for record in loop.run(checkpoint) if isinstance(record, StepRecord)]
    tracker.finish()
    return records


async def plain_loop(live: LivePools) -> list[float]:
    """Synchronous training without any pipeline: one prompt after the other, one stage after the other."""
    config, pools, prompts = live.prepared.config, live.pools, live.prepared.train_prompts
    size, samples = config.pipeline.prompts_per_step, config.pipeline.samples_per_prompt
    order = PromptOrder(len(prompts), config.seed, config.data.shuffle)
    losses = []
    for step in range(STEPS):
        groups = []
        for number in range(step * size, (step + 1) * size):
            prompt = prompts[order.index(number)]
            answers = await pools.rollout.generate(prompt, samples, group_seed(config.seed, number))
            rewards = np.array([shorter_is_better(prompt, answer.text) for answer in answers], dtype=np.float32)
            groups.append(TrajectoryGroup(prompt, tuple(answers), rewards))
        batch, _ = make_train_batch(groups, config.algorithm)
        assert batch is not None
        batch = replace(batch, old_logprobs=await pools.trainer.compute_logprobs(batch))
        losses.append((await pools.trainer.update(batch))["loss"])
        await pools.sync.run(step + 1)
    return losses


@pytest.fixture(scope="module")
def unbroken(live: LivePools) -> list[float]:
    """Losses of synchronous training through the pipeline; its checkpoints stay in the run folder."""
    live.reset()
    return [record.loss for record in live.run(train(live, live.prepared.config))]


def test_staleness_0_is_a_plain_loop(live: LivePools, unbroken: list[float]) -> None:
    live.reset()
    plain = live.run(plain_loop(live))
    assert len(unbroken) == STEPS and any(abs(loss) > 1e-4 for loss in unbroken)
    np.testing.assert_allclose(unbroken, plain, rtol=0, atol=TOLERANCE)
    assert all(record.staleness_max == 0 for record in read_metrics(live.prepared.config.run_path).steps)


def test_resume_goes_on_as_if_unbroken(live: LivePools, unbroken: list[float], tmp_path: Path) -> None:
    """From a checkpoint in the middle; the trainer's memory holds something else when it is loaded."""
    live.reset()
    middle = live.prepared.config.run_path / "checkpoints" / "step-000002"
    config = live.prepared.config.model_copy(update={"run_dir": str(tmp_path)})
    records = live.run(train(live, config, middle))
    assert [record.step for record in records] == [3, 4]
    np.testing.assert_allclose([record.loss for record in records], unbroken[2:], rtol=0, atol=TOLERANCE)


def test_training_goes_on_while_a_checkpoint_is_written(
    live: LivePools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write is made slow; steps go on beside it, wait only for the save before, and the last one is waited for."""
    live.reset()
    config = make_config(Path(live.prepared.config.model.path), tmp_path, checkpoint={"every_steps": 2})
    write = live.pools.trainer.write

    async def slow_write(directory: str):
        await asyncio.sleep(1.5)
        return await write(directory)

    monkeypatch.setattr(live.pools.trainer, "write", slow_write)
    live.run(train(live, config))
    spans = read_trace(tmp_path)
    stopped, whole = (stage_seconds(spans, stage) for stage in ("checkpoint", "checkpoint_write"))
    first = min((span for span in spans if span.stage == "checkpoint"), key=lambda span: span.start_s)
    print(f"a save takes {whole / 2:.2f} s; the first stops its step for {first.seconds:.3f} s, all {stopped:.3f} s")
    assert overlaps(spans, "checkpoint_write", "update") > 0.02
    assert first.seconds < 0.5 < 1.5 < whole / 2
    store = CheckpointStore(tmp_path / "checkpoints", 9)
    assert store.load_newest() == tmp_path / "checkpoints" / f"step-{STEPS:06d}"


def test_a_save_that_fails_ends_the_run_at_its_next_step(
    live: LivePools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's file is damaged after it was written: the checkpoint before stays the latest."""
    live.reset()
    config = make_config(Path(live.prepared.config.model.path), tmp_path)
    write = live.pools.trainer.write

    async def damaged_write(directory: str):
        written = await write(directory)
        if "step-000002" in directory:
            file = Path(directory) / "trainer" / "rank-00000.safetensors"
            file.write_bytes(file.read_bytes()[:-1] + b"x")
        return written

    monkeypatch.setattr(live.pools.trainer, "write", damaged_write)
    with pytest.raises(CheckpointError, match=r"checkpoint of step 2 was not saved: .*rank-00000.* was changed"):
        live.run(train(live, config))
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-000001"
    assert [record.step for record in read_metrics(tmp_path).steps][-1] in (2, 3)


def test_rollout_goes_on_during_a_slow_update(live: LivePools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live.reset()
    # Many answers a prompt, so that a rollout takes longer than the logprob stage before the update.
    pipeline = {"max_staleness": 2, "samples_per_prompt": 192}
    config = make_config(Path(live.prepared.config.model.path), tmp_path, pipeline=pipeline)
    update = live.pools.trainer.update

    async def slow_update(batch):
        await asyncio.sleep(1.5)
        return await update(batch)

    monkeypatch.setattr(live.pools.trainer, "update", slow_update)
    records = live.run(train(live, config))
    spans = read_trace(tmp_path)
    assert overlaps(spans, "rollout", "update") > 0.05
    assert max(record.staleness_max for record in records) in (1, 2)
    assert all(record.dropped_stale == 0 for record in records)


def test_a_killed_engine_is_replaced_and_the_run_goes_on(live: LivePools, tmp_path: Path) -> None:
    """The only engine, killed between two steps, when no prompt may be under way to notice it."""
    live.reset()
    config = make_config(Path(live.prepared.config.model.path), tmp_path, checkpoint={"every_steps": 0})

    async def train_and_kill() -> list[StepRecord]:
        tracker = Tracker(config, tmp_path)
        store = CheckpointStore(tmp_path / "checkpoints", 1)
        loop = TrainingLoop(config, live.pools, tracker, store, live.prepared.train_prompts, [])
        records: list[StepRecord] = []
        async for record in loop.run(None):
            assert isinstance(record, StepRecord)
            records.append(record)
            if record.step == 2:
                (engine,) = live.pools.rollout.actors.actors.values()
                assert engine.where is not None
                os.kill(engine.where.pid, signal.SIGKILL)
        tracker.finish()
        return records

    records = live.run(train_and_kill())
    assert [record.version for record in records] == list(range(1, STEPS + 1))
    assert records[-1].engine["lost_engines"] == 1
