"""Checkpoints that are written while training goes on.

    trainer copies its state to host memory -> [step goes on]  ranks write -> verify -> seal -> `latest` -> upload

Invariant: one save is under way at a time, and none is lost silently: a failure is raised at the next step, at the next
save, or at the end of the run, and `latest` still names the checkpoint before.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Protocol

from rl_actors.config import RunConfig
from rl_actors.config_file import dump_config
from rl_actors.data.order import PromptOrder
from rl_actors.digests import Digest
from rl_actors.driver.checkpoint_storage import CheckpointStorage
from rl_actors.driver.checkpoint_store import CheckpointStore, Score
from rl_actors.driver.run_folder import write_driver_state
from rl_actors.errors import CheckpointError
from rl_actors.tracking.tracker import Tracker

logger = logging.getLogger(__name__)


class Trainer(Protocol):
    """What a save needs of the trainer's pool."""

    async def snapshot(self) -> None: ...

    async def write(self, directory: str) -> dict[str, Digest]: ...


class BackgroundSave:
    """Saves checkpoints of one run.

    Args:
        config: of the run.
        trainer: its pool.
        tracker: takes the span "checkpoint", during which the step waits, and "checkpoint_write", beside the steps.
        store: where checkpoints go.
        order: of the prompts, for the data cursor.
        storage: where whole checkpoints are uploaded to, if anywhere.
    """

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        tracker: Tracker,
        store: CheckpointStore,
        order: PromptOrder,
        storage: CheckpointStorage | None = None,
    ) -> None:
        self._config, self._trainer, self._tracker = config, trainer, tracker
        self._store, self._order, self._storage = store, order, storage
        self._writing: asyncio.Task[None] | None = None

    async def start(self, step: int, score: Score | None) -> None:
        """Take the trainer's state, once an earlier save is done, and write it in the background.

        Raises:
            CheckpointError: the earlier save failed.
        """
        with self._tracker.span("checkpoint", step, "trainer"):
            await self.finish()
            await self._trainer.snapshot()
        self._writing = asyncio.create_task(self._write(step, score))

    def check(self) -> None:
        """Raises CheckpointError if a save has failed."""
        if self._writing is not None and self._writing.done():
            task, self._writing = self._writing, None
            task.result()

    async def finish(self) -> None:
        """Wait until nothing is being written.

        Raises:
            CheckpointError: that save failed, or an upload hangs: it is not done in twice `timeouts.checkpoint_s`.
        """
        if self._writing is not None:
            limit_s = 2 * self._config.timeouts.checkpoint_s
            done, _ = await asyncio.wait([self._writing], timeout=limit_s)
            if not done:
                self._writing = None
                where = f"written and uploaded to {self._storage.uri}" if self._storage else "written"
                raise CheckpointError(f"a checkpoint was not {where} within {limit_s:g} s (2 x timeouts.checkpoint_s)")
        self.check()

    async def settle(self) -> None:
        """`finish` for a run that ends in another error already: a failure is logged only."""
        try:
            await self.finish()
        except CheckpointError as error:
            logger.error("%s", error)

    async def _write(self, step: int, score: Score | None) -> None:
        with self._tracker.span("checkpoint_write", step, "checkpoint"):
            try:
                folder = await asyncio.to_thread(self._store.begin, step)
                written = await self._trainer.write(str(folder))
                await asyncio.to_thread(self._seal, folder, step, written, score)
            except Exception as error:
                cause = getattr(error, "cause", None) or error
                raise CheckpointError(
                    f"the checkpoint of step {step} was not saved: {str(cause) or type(cause).__name__}"
                ) from error

    def _seal(self, folder: Path, step: int, written: dict[str, Digest], score: Score | None) -> None:
        write_driver_state(folder, self._config, step, self._order)
        (folder / "config.yaml").write_text(dump_config(self._config))
        checkpoint = self._store.commit(step, written, score)
        if self._storage is not None:
            self._storage.upload(checkpoint)
