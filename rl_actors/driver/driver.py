"""The driver actor: owns the pools, runs the training loop on them, and streams what happens to the job.

Invariant: however a run ends, its files are closed and its actors and bundles are given back.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from rl_actors.config import RunConfig
from rl_actors.config_file import dump_config
from rl_actors.data.order import PromptOrder
from rl_actors.driver.checkpoint_storage import CheckpointStorage
from rl_actors.driver.checkpoint_store import CheckpointStore
from rl_actors.driver.pools import start_pools
from rl_actors.driver.run_folder import only_writer, read_step
from rl_actors.driver.training_loop import TrainingLoop
from rl_actors.errors import CheckpointError
from rl_actors.tracking.console import PlacedActor, configure_logging
from rl_actors.tracking.records import EvalRecord, StepRecord
from rl_actors.tracking.tracker import Tracker
from rl_actors.types import Prompt

logger = logging.getLogger(__name__)

Event = list[PlacedActor] | StepRecord | EvalRecord | dict[str, Any]
"""What a run streams: first where its actors are, then records, at last its summary."""


class Driver:
    """Runs one training job. A plain class; `jobs.train` makes a Ray actor of it and iterates over `run`.

    Args:
        config: of the run, with absolute paths (`preflight.prepare`).
        train_prompts, eval_prompts: as token ids; the latter may be empty.
    """

    def __init__(self, config: RunConfig, train_prompts: list[Prompt], eval_prompts: list[Prompt]) -> None:
        self._config = config
        self._prompts = train_prompts
        self._eval_prompts = eval_prompts

    async def run(self) -> AsyncIterator[Event]:
        """Train from the newest whole checkpoint, or from the base model, to the last step."""
        configure_logging()  # what is fetched or damaged is said before anything else starts
        with only_writer(self._config.run_path):
            async for event in self._run():
                yield event

    async def _run(self) -> AsyncIterator[Event]:
        config, folder = self._config, self._config.run_path
        store = CheckpointStore(folder / "checkpoints", config.checkpoint.keep_last, config.checkpoint.keep_best)
        uri = config.checkpoint.storage
        storage = None if uri is None else CheckpointStorage(uri, folder.name, store.retention)
        checkpoint = find_checkpoint(config, store, storage)
        if checkpoint is not None:
            order = PromptOrder(len(self._prompts), config.seed, config.data.shuffle)
            step = read_step(checkpoint, config, order)
            if step >= config.pipeline.steps:
                logger.warning(
                    "nothing to train: %s is already after step %d of pipeline.steps %d",
                    checkpoint,
                    step,
                    config.pipeline.steps,
                )
        tracker = Tracker(config, folder, None if checkpoint is None else store.step_of(checkpoint))
        (folder / "config.yaml").write_text(dump_config(config))
        finished = False
        try:
            async with start_pools(config, folder.name) as pools:
                yield pools.placed_actors()
                tracker.start()
                tracker.milestone("pools_started")
                loop = TrainingLoop(config, pools, tracker, store, self._prompts, self._eval_prompts, storage)
                async for record in loop.run(checkpoint):
                    yield record
            finished = True
        finally:
            summary = tracker.finish(failed=not finished)
        yield summary


def find_checkpoint(config: RunConfig, store: CheckpointStore, storage: CheckpointStorage | None) -> Path | None:
    """The newest whole checkpoint of the run folder or of `checkpoint.storage`, brought into the run folder.

    Raises:
        CheckpointError: there are checkpoints, and none is whole.
    """
    if config.checkpoint.resume == "never":
        if storage is not None:
            storage.forget()
        return None
    if storage is None:
        return store.load_newest()
    try:
        local, fault = store.load_newest(), None
    except CheckpointError as error:
        local, fault = None, error
    fetched = storage.fetch_newest(store, newer_than=0 if local is None else store.step_of(local))
    if fetched is None and fault is not None:
        raise fault
    return fetched or local
