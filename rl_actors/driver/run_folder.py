"""One run at a time in a run folder, and only a run that fits what is there.

Invariant: a second writer is refused while the first lives, and a checkpoint is continued only with the data, batch and
adapters it was made with. Both are found before a pool starts.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl_actors.config import RunConfig
from rl_actors.data.order import PromptOrder
from rl_actors.errors import CheckpointError, ConfigError
from rl_actors.json_object import json_object

DRIVER_STATE = "driver.json"


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the system drops it when the process ends, however it ends.

    Raises:
        ConfigError: another run holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"run_dir {folder} belongs to a run that is going on: wait for it or use another"
            ) from error
        yield


def write_driver_state(checkpoint: Path, config: RunConfig, step: int, order: PromptOrder) -> None:
    """Put what `read_step` needs into a checkpoint."""
    (checkpoint / DRIVER_STATE).write_text(json.dumps({"step": step, **_identity(config, order)}, indent=1))


def read_step(checkpoint: Path, config: RunConfig, order: PromptOrder) -> int:
    """The step a checkpoint was written after, if the run may go on from it.

    Prompts are drawn in a fixed order and trained in it, so the step is the whole data cursor.

    Raises:
        CheckpointError: it was made with other settings; names each and both values.
    """
    try:
        state = json_object((checkpoint / DRIVER_STATE).read_bytes())
        if type(state.get("step")) is not int:
            raise ValueError("it has no step")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {checkpoint} has no readable {DRIVER_STATE} ({' '.join(str(error).split())}): remove the "
            "checkpoint to go on from the one before"
        ) from error
    differing = [
        f"{name} was {state.get(name)} and is now {value}"
        for name, value in _identity(config, order).items()
        if state.get(name) != value
    ]
    if differing:
        raise CheckpointError(
            f"checkpoint {checkpoint} belongs to another run: {'; '.join(differing)}. Use the settings it was made "
            "with, another run_dir, or checkpoint.resume=never"
        )
    return int(state["step"])


def _identity(config: RunConfig, order: PromptOrder) -> dict[str, Any]:
    """What must not change within a run: it decides which prompts are trained when, and what the adapters are."""
    return {
        "data (prompts and their order)": order.fingerprint,
        "pipeline.prompts_per_step": config.pipeline.prompts_per_step,
        "seed": config.seed,
        "lora": json.loads(config.lora.model_dump_json()),
    }
