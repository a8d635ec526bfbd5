"""The folder of a run's checkpoints: each one is whole or absent.

A checkpoint is written into `.writing-step-N`, read back and compared with what its writers had in memory, sealed with
a manifest (size and SHA-256 of every file), renamed to `step-N`, and only then named by the file `latest`, which itself
moves by rename. A reader verifies the manifest, so a truncated, changed or missing file is found at load and named, and
the newest older checkpoint that is whole serves. The newest whole checkpoints and the best ones are never removed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from itertools import islice
from pathlib import Path

from rl_actors.digests import Digest, digest_of, digests_of
from rl_actors.errors import CheckpointError
from rl_actors.json_object import json_object

logger = logging.getLogger(__name__)

MANIFEST, SCORE, LATEST = "manifest.json", "score.json", "latest"
_WRITING = ".writing-"
SEALED = re.compile(r"step-\d{6,}")


@dataclass(frozen=True)
class Score:
    """How good the weights of a checkpoint are; only scores of the same kind are compared."""

    value: float
    kind: str

    @classmethod
    def parse(cls, text: str | bytes) -> Score | None:
        """From what `score.json` holds; None if that is no number of a kind."""
        try:
            tree = json_object(text)
            value, kind = tree["value"], tree["kind"]
            return cls(float(value), kind) if type(value) in (int, float) and type(kind) is str else None
        except (ValueError, KeyError, OverflowError):
            return None


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the newest `last` and, by score, the best `best`."""

    last: int
    best: int = 0

    def superseded(self, scores: Mapping[int, Score | None], newest: int, whole: Callable[[int], bool]) -> list[int]:
        """The steps to remove, now that `newest` was written.

        Later steps than `newest` were left behind when the run went on from an older checkpoint, so they go.

        Args:
            scores: of all checkpoints by step; None where there is none.
            whole: whether a checkpoint is undamaged. A damaged one takes the place of no other.
        """
        whole = cache(whole)
        later = sorted(step for step in scores if step > newest)
        steps = sorted((step for step in scores if step <= newest), reverse=True)
        last = list(islice(filter(whole, steps), self.last))
        if len(last) < self.last:
            return later
        best = set(islice(filter(whole, self._ranked({step: scores[step] for step in steps})), self.best))
        return sorted(step for step in steps if step < last[-1] and step not in best) + later

    @staticmethod
    def _ranked(scores: Mapping[int, Score | None]) -> list[int]:
        """Steps from the best to the worst, of those whose score is of the newest's kind."""
        known = {step: score for step, score in scores.items() if score and math.isfinite(score.value)}
        kind = known[max(known)].kind if known else ""
        return [
            step for _, step in sorted(((s.value, step) for step, s in known.items() if s.kind == kind), reverse=True)
        ]


class CheckpointStore:
    """Checkpoints of one run under `folder`; the newest `keep_last` and the best `keep_best` stay."""

    def __init__(self, folder: Path, keep_last: int, keep_best: int = 0) -> None:
        self.folder = folder
        self.retention = Retention(keep_last, keep_best)
        self._verified: dict[int, list[tuple[str, int, int]]] = {}

    def begin(self, step: int) -> Path:
        """An empty folder to write step `step` into. What an interrupted write left there is removed."""
        writing = self.folder / f"{_WRITING}{name_of(step)}"
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
        return writing

    def commit(self, step: int, written: Mapping[str, Digest] | None = None, score: Score | None = None) -> Path:
        """Verify and seal what was written since `begin(step)`, make it the latest, and remove what is superseded.

        Args:
            written: what files must hold, by relative path, as their writers had the bytes in memory.
            score: of the weights, for keeping the best.

        Raises:
            CheckpointError: a file does not hold what was written; `latest` has not moved.
        """
        writing = self.folder / f"{_WRITING}{name_of(step)}"
        if score is not None:
            (writing / SCORE).write_text(json.dumps(asdict(score)))
        files = sorted(path for path in writing.rglob("*") if path.is_file())
        for path in files:
            _flush(path)
        manifest = {str(p.relative_to(writing)): digest for p, digest in zip(files, digests_of(files), strict=True)}
        for name, expected in (written or {}).items():
            _compare(writing, name, manifest.get(name), expected)
        _write(writing / MANIFEST, json.dumps(manifest, indent=1))
        return self._publish(step)

    def adopt(self, step: int, fill: Callable[[Path], None]) -> Path:
        """Take in a sealed checkpoint from elsewhere; `fill` writes it, manifest included, into the folder it gets.

        Raises:
            CheckpointError: it is not whole; nothing has changed here.
        """
        writing = self.begin(step)
        try:
            fill(writing)
            verify(writing)
        except BaseException:
            shutil.rmtree(writing, ignore_errors=True)
            raise
        for path in writing.rglob("*"):
            _flush(path)
        return self._publish(step)

    def _publish(self, step: int) -> Path:
        writing, final = self.folder / f"{_WRITING}{name_of(step)}", self.folder / name_of(step)
        shutil.rmtree(final, ignore_errors=True)
        writing.rename(final)
        _flush(self.folder)
        pointer = self.folder / f"{_WRITING}{LATEST}"
        _write(pointer, final.name)
        pointer.replace(self.folder / LATEST)
        _flush(self.folder)
        self._verified[step] = _stamp(final)
        scores = {one: self.score(one) for one in self.steps()}
        for old in self.retention.superseded(scores, step, self.is_whole):
            shutil.rmtree(self.folder / name_of(old), ignore_errors=True)
        return final

    def is_whole(self, step: int) -> bool:
        """Whether a sealed checkpoint is undamaged. Its bytes are read again only if a file has changed since."""
        folder = self.folder / name_of(step)
        try:
            stamp = _stamp(folder)
            if self._verified.get(step) != stamp:
                verify(folder)
                self._verified[step] = stamp
        except (CheckpointError, OSError) as error:
            logger.warning("%s: it counts as neither new nor good, and stays until it is superseded", error)
            return False
        return True

    def score(self, step: int) -> Score | None:
        """The score that a sealed checkpoint was given, if any."""
        try:
            return Score.parse((self.folder / name_of(step) / SCORE).read_bytes())
        except OSError:
            return None

    def steps(self) -> list[int]:
        """Steps of the sealed checkpoints, oldest first."""
        return sorted(self.step_of(path) for path in self.folder.glob("step-*") if SEALED.fullmatch(path.name))

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
            checkpoint = self.folder / name_of(step)
            try:
                verify(checkpoint)
            except CheckpointError as error:
                faults.append(str(error))
                continue
            self._verified[step] = _stamp(checkpoint)
            if faults:
                logger.warning(
                    "%s. The newest whole checkpoint is %s: the run goes on from it, steps after %d are trained again",
                    "; ".join(faults),
                    checkpoint,
                    step,
                )
            return checkpoint
        if faults:
            raise CheckpointError(
                f"no checkpoint is whole: {'; '.join(faults)}. Bring a whole one back, or start anew with "
                "checkpoint.resume=never"
            )
        return None


def verify(checkpoint: Path) -> None:
    """Check every byte of a sealed checkpoint against its manifest.

    Raises:
        CheckpointError: names the first file that is missing, truncated or changed.
    """
    path = checkpoint / MANIFEST
    try:
        manifest = json_object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {checkpoint} has no readable {MANIFEST}") from error
    if not manifest:
        raise CheckpointError(f"checkpoint {checkpoint} has an empty {MANIFEST}")
    if any(not isinstance(entry, dict) or entry.keys() != Digest.__annotations__.keys() for entry in manifest.values()):
        raise CheckpointError(f"checkpoint {checkpoint} has a damaged {MANIFEST}")
    for name, expected in manifest.items():
        file = checkpoint / name
        try:
            found = digest_of(file) if file.is_file() else None
        except OSError as error:
            raise CheckpointError(f"checkpoint {checkpoint}: {name[:100]} cannot be read: {error.strerror}") from error
        _compare(checkpoint, name, found, expected)


def verify_or_offer(checkpoint: Path) -> None:
    """`verify`; the error also names the newest whole checkpoint that lies before this one in the same folder."""
    try:
        verify(checkpoint)
    except CheckpointError as error:
        store = CheckpointStore(checkpoint.parent, keep_last=1)
        if not SEALED.fullmatch(checkpoint.name):
            raise
        for step in reversed([step for step in store.steps() if step < store.step_of(checkpoint)]):
            try:
                verify(store.folder / name_of(step))
            except CheckpointError:
                continue
            raise CheckpointError(
                f"{error}; the newest whole one before it is {store.folder / name_of(step)}"
            ) from error
        raise CheckpointError(f"{error}; there is no whole one before it") from error


def _compare(checkpoint: Path, name: str, found: Digest | None, expected: Digest) -> None:
    if found is None:
        raise CheckpointError(f"checkpoint {checkpoint} lacks {name}")
    if found["bytes"] != expected["bytes"]:
        raise CheckpointError(
            f"checkpoint {checkpoint}: {name} has {found['bytes']} bytes, {expected['bytes']} were written"
        )
    if found != expected:
        raise CheckpointError(f"checkpoint {checkpoint}: {name} was changed after it was written")


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def named_by(content: bytes, where: object) -> str:
    """The checkpoint that a file `latest` names. Raises CheckpointError if it is damaged."""
    name = content.decode(errors="replace").strip()
    if not SEALED.fullmatch(name):
        raise CheckpointError(f"{where} is damaged: give one of the checkpoints beside it, such as step-000040")
    return name


def _stamp(checkpoint: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of every file."""
    return sorted((str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in checkpoint.rglob("*"))


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
