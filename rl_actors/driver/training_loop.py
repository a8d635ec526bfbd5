"""The pipeline of one run: rollout -> reward -> logprob -> update -> sync, with rollout ahead of the rest.

Two tasks share one event loop. `_produce` admits prompts as the staleness bound allows and turns each into a scored
group; `run` takes the groups of one step after another, updates, and publishes the new weights. They meet only in
the `GroupQueue`. With max_staleness 0 no prompt of a later step is admitted before the update is published, which is
plain synchronous training.

A lost engine is started again and brought to the present version: with the next sync while other engines sample on,
at once when it was the last. A lost trainer rank ends the run, which goes on from its newest checkpoint when it is
submitted again.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from rl_actors.algorithms.batching import make_train_batch, split_batch
from rl_actors.config import RunConfig
from rl_actors.data.order import PromptOrder
from rl_actors.driver.background_save import BackgroundSave
from rl_actors.driver.checkpoint_storage import CheckpointStorage
from rl_actors.driver.checkpoint_store import CheckpointStore, Score
from rl_actors.driver.group_queue import GroupQueue
from rl_actors.driver.pools import Pools
from rl_actors.driver.records import step_record
from rl_actors.driver.run_folder import read_step
from rl_actors.driver.together import together
from rl_actors.errors import ActorDiedError, ActorLateError, SyncError, TrainingError
from rl_actors.rollout.samples import Sampling
from rl_actors.tracking.records import EvalRecord, StepRecord
from rl_actors.tracking.tracker import Tracker
from rl_actors.types import Prompt, TrainBatch, Trajectory, TrajectoryGroup
from rl_actors.weight_sync.sync import SyncReport

logger = logging.getLogger(__name__)

SYNC_ATTEMPTS = 3
ENGINE_LIVES = 3
"""How often a prompt is sampled again because no engine was left."""
WATCH_EVERY_S = 10.0


class TrainingLoop:
    """Trains from a weight version to the last step.

    Args:
        config: of the run, with absolute paths.
        pools: started, engines holding the base model.
        tracker: takes spans, records and evaluations.
        store: where checkpoints go.
        prompts, eval_prompts: as token ids; the latter may be empty.
        storage: where checkpoints are uploaded to, if anywhere.
    """

    def __init__(
        self,
        config: RunConfig,
        pools: Pools,
        tracker: Tracker,
        store: CheckpointStore,
        prompts: Sequence[Prompt],
        eval_prompts: Sequence[Prompt],
        storage: CheckpointStorage | None = None,
    ) -> None:
        self._config = config
        self._pools = pools
        self._tracker = tracker
        self._prompts = prompts
        self._eval_prompts = eval_prompts
        self._order = PromptOrder(len(prompts), config.seed, config.data.shuffle)
        self._saves = BackgroundSave(config, pools.trainer, tracker, store, self._order, storage)
        # Held from the start of an update until its weights are published: nobody else may send weights meanwhile.
        self._weights = asyncio.Lock()

    async def run(self, checkpoint: Path | None) -> AsyncIterator[StepRecord | EvalRecord]:
        """Train, from a checkpoint or from the base model; yields every record once it is on disk."""
        steps, pipeline = self._config.pipeline.steps, self._config.pipeline
        version = await self._begin(checkpoint)
        queue = GroupQueue(pipeline.prompts_per_step, pipeline.max_staleness, version)
        if version == 0 and self._eval_prompts:
            yield await self._evaluate(queue)
        helpers = [asyncio.create_task(self._produce(queue)), asyncio.create_task(self._watch_trainer(queue))]
        try:
            for step in range(version + 1, steps + 1):
                self._saves.check()
                record, evaluation = await self._step(step, queue), None
                yield record
                if self._eval_prompts and (step == steps or _due(step, self._config.evaluation.every_steps)):
                    evaluation = await self._evaluate(queue)
                    yield evaluation
                if step == steps or _due(step, self._config.checkpoint.every_steps):
                    await self._saves.start(step, self._score(record, evaluation))
            await self._saves.finish()
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            await self._saves.settle()

    async def _begin(self, checkpoint: Path | None) -> int:
        """Bring trainer and engines to the same version, 0 or a checkpoint's; returns it."""
        pools = self._pools
        await pools.rollout.pause()
        await pools.sync.set_up(check_base=True)
        if checkpoint is None:
            # The engines hold the base model, which step 0 is unless adapters were given.
            await (pools.rollout.resume(0) if self._config.lora.init_from is None else self._publish(0))
            return 0
        version = read_step(checkpoint, self._config, self._order)
        await pools.trainer.load(str(checkpoint))
        await self._publish(version)
        logger.info("going on after step %d from %s", version, checkpoint)
        return version

    # ---- rollout and reward ----

    async def _produce(self, queue: GroupQueue) -> None:
        """Start every group of the run as soon as it is admitted; an error of any ends up in the queue."""
        wanted = self._config.pipeline.steps * self._config.pipeline.prompts_per_step
        try:
            async with asyncio.TaskGroup() as groups:
                while (number := await queue.admit()) < wanted:
                    groups.create_task(self._make_group(number, queue))
        except* Exception as errors:  # noqa: BLE001 - `take` raises it again
            await queue.fail(errors.exceptions[0])

    async def _make_group(self, number: int, queue: GroupQueue) -> None:
        step = number // self._config.pipeline.prompts_per_step + 1
        prompt = self._prompts[self._order.index(number)]
        samples = self._config.pipeline.samples_per_prompt
        with self._tracker.span("rollout", step, "rollout"):
            trajectories = await self._sample(prompt, samples, group_seed(self._config.seed, number), None, queue)
        with self._tracker.span("reward", step, "reward"):
            rewards = await self._pools.reward.score(prompt, trajectories)
        await queue.put(number, TrajectoryGroup(prompt, tuple(trajectories), rewards))

    async def _sample(
        self, prompt: Prompt, samples: int, seed: int, sampling: Sampling | None, queue: GroupQueue
    ) -> list[Trajectory]:
        """Answers to one prompt, also if the last engine dies meanwhile."""
        for _ in range(ENGINE_LIVES):
            try:
                return await self._pools.rollout.generate(prompt, samples, seed, sampling)
            except ActorDiedError as error:
                logger.warning("%s", error)
                await self._revive_engines(queue)
        return await self._pools.rollout.generate(prompt, samples, seed, sampling)

    async def _revive_engines(self, queue: GroupQueue) -> None:
        """Start dead engines again, at the published version. Many prompts may ask at once; the first one does it."""
        async with self._weights:
            if await self._pools.rollout.restart_dead():
                self._tracker.instant("engines restarted", version=queue.version)
                self._pools.sync.invalidate()
                await self._publish(queue.version)

    # ---- logprob, update, sync ----

    async def _step(self, step: int, queue: GroupQueue) -> StepRecord:
        config, tracker = self._config, self._tracker
        with tracker.span("rollout_wait", step, "driver"):
            groups = await queue.take()
        if not tracker.reached("first_token") and (first_token := await self._pools.rollout.first_token_at()):
            tracker.milestone("first_token", first_token)
        _check_logprobs(groups)
        batch, stats = make_train_batch(groups, config.algorithm)
        metrics: Mapping[str, float] = {}
        if batch is None:
            logger.warning("step %d trains nothing: in each of its %d groups all rewards are alike", step, len(groups))
        async with self._weights:
            if batch is not None:
                await self._make_room(step)
                batch = await self._with_logprobs(step, batch)
                with tracker.span("update", step, "trainer"):
                    parts = split_batch(batch, config.algorithm.updates_per_batch, config.algorithm)
                    metrics = _mean([await self._pools.trainer.update(part) for part in parts])
                tracker.milestone("first_update")
                await self._give_room_back(step)
            with tracker.span("sync", step, "sync"):
                report = await self._publish(step)
            await queue.advance(step)
        engine = await self._pools.rollout.stats()
        return tracker.step(step_record(step, groups, stats, batch, metrics, report, queue.depth, engine))

    async def _make_room(self, step: int) -> None:
        """Colocated engines give memory to the trainer, if the run wants it: all answers of the step are there."""
        if self._config.rollout.sleep != "never":
            with self._tracker.span("sleep", step, "rollout"):
                await self._pools.rollout.sleep()

    async def _give_room_back(self, step: int) -> None:
        """The sync needs the engines' weights; their KV cache comes back when they resume."""
        if self._config.rollout.sleep != "never":
            with self._tracker.span("wake", step, "rollout"):
                await self._pools.trainer.release_memory()
                await self._pools.rollout.wake_weights()

    async def _with_logprobs(self, step: int, batch: TrainBatch) -> TrainBatch:
        """Add what the loss compares with: the trainer's own logprobs before the step, and the base model's."""
        trainer = self._pools.trainer
        with self._tracker.span("logprob", step, "trainer"):
            batch = replace(batch, old_logprobs=await trainer.compute_logprobs(batch))
        if self._config.algorithm.kl_coef > 0:
            with self._tracker.span("ref_logprob", step, "trainer"):
                batch = replace(batch, ref_logprobs=await trainer.compute_logprobs(batch, adapters=False))
        return batch

    async def _publish(self, version: int) -> SyncReport:
        """Make the engines serve the trainer's present weights; replaces engines that died."""
        for attempt in itertools.count(1):
            try:
                return await self._pools.sync.run(version)
            except SyncError as error:
                await self._ping_trainer()
                if attempt == SYNC_ATTEMPTS:
                    raise
                logger.warning("%s; trying again (%d of %d)", error, attempt + 1, SYNC_ATTEMPTS)
                self._tracker.instant("sync failed", version=version, error=str(error))
                await self._pools.rollout.restart_dead()
                self._pools.sync.invalidate()
        raise AssertionError("unreachable")

    async def _ping_trainer(self) -> None:
        """Raises ActorDiedError naming a trainer rank that is gone; without it no retry can help."""
        await self._pools.trainer.actors.acall("ping", timeout_s=self._config.timeouts.sync_s, control=True)

    async def _watch_trainer(self, queue: GroupQueue) -> None:
        """Tell the queue when a trainer rank dies, since nobody calls the ranks while groups are awaited."""
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            try:
                await self._ping_trainer()
            except ActorLateError as error:
                logger.warning("%s", error)
            except ActorDiedError as error:
                await queue.fail(error)
                return

    # ---- evaluation and checkpoints ----

    async def _evaluate(self, queue: GroupQueue) -> EvalRecord:
        """Mean reward of the held-out prompts at the present version."""
        settings = self._config.evaluation
        sampling = Sampling.for_training(self._config.rollout).with_temperature(settings.temperature)

        async def score(number: int, prompt: Prompt) -> np.ndarray:
            seed = group_seed(self._config.seed, -1 - number)
            trajectories = await self._sample(prompt, settings.samples, seed, sampling, queue)
            return await self._pools.reward.score(prompt, trajectories)

        with self._tracker.span("evaluation", queue.version, "driver"):
            scores = await together(score(*pair) for pair in enumerate(self._eval_prompts))
        return self._tracker.evaluation(queue.version, float(np.mean(scores)))

    def _score(self, record: StepRecord, evaluation: EvalRecord | None) -> Score | None:
        """What `checkpoint.keep_best` compares: the held-out reward in runs that evaluate, else the step's reward."""
        if not (self._eval_prompts and self._config.evaluation.every_steps):
            return Score(record.reward_mean, "mean reward of the step")
        return Score(evaluation.value, "held-out reward") if evaluation else None


def _check_logprobs(groups: Sequence[TrajectoryGroup]) -> None:
    """Raises TrainingError if the engine's own numbers are not finite: the model's weights are broken."""
    for group in groups:
        for trajectory in group.trajectories:
            if not np.isfinite(trajectory.logprobs).all():
                raise TrainingError(
                    f"the engine sampled prompt {group.prompt.id} with log-probabilities that are not finite: the "
                    "weights are broken or diverged; go on from an older checkpoint, with a lower learning rate"
                )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def group_seed(run_seed: int, number: int) -> int:
    """The sampling seed of one group: another one for each, and the same in a resumed run."""
    digest = hashlib.blake2b(f"{run_seed}/{number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def _mean(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of the updates made from one batch: maxima stay maxima, the rest is averaged."""
    return {
        name: max(values) if name.startswith("max/") else sum(values) / len(values)
        for name in updates[0]
        for values in [[update[name] for update in updates]]
    }
