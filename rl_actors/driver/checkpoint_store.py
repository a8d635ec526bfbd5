"""The folder of a run's checkpoints: each one is whole or absent.

A checkpoint is written into `.writing-step-N`, sealed with a manifest (size and SHA-256 of every file), renamed to
`step-N`, and only then named by the file `latest`, which itself moves by rename. A reader verifies the manifest, so a
truncated, changed or missing file is found at load and named, and the newest older checkpoint that is whole serves.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from pathlib import Path

from rl_actors.errors import CheckpointError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_WRITING = ".writing-"
_SEALED = re.compile(r"step-\d{6,}")


class CheckpointStore:
    """Checkpoints of one run under `folder`; the newest `keep_last` stay."""

    def __init__(self, folder: Path, keep_last: int) -> None:
        self.folder = folder
        self._keep_last = keep_last

    def begin(self, step: int) -> Path:
        """An empty folder to write step `step` into. What an interrupted write left there is removed."""
        writing = self.folder / f"{_WRITING}{_name(step)}"
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
        return writing

    def commit(self, step: int) -> Path:
        """Seal what was written since `begin(step)`, make it the latest, and remove the oldest beyond `keep_last`."""
        writing, final = self.folder / f"{_WRITING}{_name(step)}", self.folder / _name(step)
        files = sorted(path for path in writing.rglob("*") if path.is_file())
        manifest = {str(path.relative_to(writing)): _describe(path) for path in files}
        for path in files:
            _flush(path)
        _write(writing / MANIFEST, json.dumps(manifest, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        writing.rename(final)
        _flush(self.folder)
        pointer = self.folder / f"{_WRITING}latest"
        _write(pointer, final.name)
        pointer.replace(self.folder / "latest")
        _flush(self.folder)
        for old in self.steps()[: -self._keep_last]:
            shutil.rmtree(self.folder / _name(old), ignore_errors=True)
        return final

    def steps(self) -> list[int]:
        """Steps of the sealed checkpoints, oldest first."""
        return sorted(self.step_of(path) for path in self.folder.glob("step-*") if _SEALED.fullmatch(path.name))

    @staticmethod
    def step_of(checkpoint: Path) -> int:
        """The step a sealed checkpoint was written after."""
        return int(checkpoint.name.removeprefix("step-"))

    def load_newest(self) -> Path | None:
        """The newest whole checkpoint, or None if there never was one.

        Raises:
            CheckpointError: there are checkpoints and none is whole; names what is wrong with each.
        """
        faults = []
        for step in reversed(self.steps()):
            try:
                verify(self.folder / _name(step))
            except CheckpointError as error:
                faults.append(str(error))
                logger.warning("%s; looking for an older checkpoint", error)
            else:
                return self.folder / _name(step)
        if faults:
            raise CheckpointError("no checkpoint is whole: " + "; ".join(faults))
        return None


def verify(checkpoint: Path) -> None:
    """Check every byte of a sealed checkpoint against its manifest.

    Raises:
        CheckpointError: names the first file that is missing, truncated or changed.
    """
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {checkpoint} has no readable {MANIFEST}") from error
    if not isinstance(manifest, dict) or not manifest:
        raise CheckpointError(f"checkpoint {checkpoint} has an empty {MANIFEST}")
    for name, expected in manifest.items():
        file = checkpoint / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {checkpoint} lacks {name}")
        if file.stat().st_size != expected["bytes"]:
            raise CheckpointError(
                f"checkpoint {checkpoint}: {name} has {file.stat().st_size} bytes, {expected['bytes']} were written"
            )
        if _describe(file) != expected:
            raise CheckpointError(f"checkpoint {checkpoint}: {name} was changed after it was written")


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _describe(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    _flush(path)


def _flush(path: Path) -> None:
    """Force a file's or folder's bytes to disk, so that a rename never names what is not there yet."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
