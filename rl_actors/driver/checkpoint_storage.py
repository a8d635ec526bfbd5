"""Checkpoints of a run at a URI (s3://, gs://, file:// or a folder), through the filesystems of Ray Train.

    STORAGE/RUN/step-000040/...   STORAGE/RUN/latest

Files are uploaded and their sizes compared, then the manifest, then the object `latest` is replaced. Invariant: what
`latest` names has its manifest, and what is fetched is verified byte by byte before it counts as a checkpoint.

Uses `get_fs_and_path` and `_pyarrow_fs_copy_files` of `ray.train._internal.storage` (Ray 2.60), with which Ray Train
saves its own checkpoints: the second one works around uploads to S3 that hang (apache/arrow 32372).
"""

from __future__ import annotations

import json
import logging
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyarrow import ArrowException
from pyarrow.fs import FileSelector, FileType, LocalFileSystem

from rl_actors.driver.checkpoint_store import (
    LATEST,
    MANIFEST,
    SCORE,
    SEALED,
    CheckpointStore,
    Retention,
    Score,
    name_of,
    named_by,
)
from rl_actors.errors import CheckpointError, ConfigError
from rl_actors.json_object import json_object

logger = logging.getLogger(__name__)


class CheckpointStorage:
    """The checkpoints of the run `run_name` below `uri`.

    Raises:
        ConfigError: the URI is not usable, or nothing can be written there.
    """

    def __init__(self, uri: str, run_name: str, retention: Retention) -> None:
        from ray.train._internal.storage import get_fs_and_path

        self.uri = f"{uri.partition('?')[0].rstrip('/')}/{run_name}"
        self._retention = retention
        marker = "?"
        try:
            self._files, path = get_fs_and_path(uri)
            self._root = posixpath.join(path, run_name)
            self._files.create_dir(self._root)
            marker = posixpath.join(self._root, ".writable")
            self._put(marker, b"")
            self._files.delete_file(marker)
        except (OSError, ArrowException, ValueError) as error:
            raise ConfigError(f"checkpoint.storage {uri} cannot be written: {_one_line(error)}") from error

    def upload(self, checkpoint: Path) -> None:
        """Store a sealed checkpoint, make it the latest there, and remove what it supersedes.

        Raises:
            CheckpointError: it is not all there; `latest` has not moved.
        """
        target = posixpath.join(self._root, checkpoint.name)
        manifest = (checkpoint / MANIFEST).read_bytes()
        with self._as_checkpoint_error(f"{checkpoint.name} was not uploaded to {self.uri}"):
            if self._files.get_file_info(target).type != FileType.NotFound:
                self._files.delete_dir(target)
            names = json.loads(manifest)
            for folder in sorted({posixpath.dirname(name) for name in names}):
                self._files.create_dir(posixpath.join(target, folder))
            for name in names:
                self._copy(checkpoint / name, posixpath.join(target, name))
            for name, digest in names.items():
                size = self._files.get_file_info(posixpath.join(target, name)).size
                if size != digest["bytes"]:
                    raise OSError(f"{name} has {size} bytes there, {digest['bytes']} were sent")
            self._put(posixpath.join(target, MANIFEST), manifest)
            self._put(posixpath.join(self._root, LATEST), checkpoint.name.encode())
            step = CheckpointStore.step_of(checkpoint)
            scores = {one: self._score(one) for one in self._steps()}
            for old in self._retention.superseded(scores, step, self._is_complete):
                self._files.delete_dir(posixpath.join(self._root, name_of(old)))

    def fetch_newest(self, store: CheckpointStore, newer_than: int) -> Path | None:
        """Take the newest whole checkpoint into the local store, if it is of a step behind `newer_than`.

        Raises:
            CheckpointError: the storage cannot be read.
        """
        with self._as_checkpoint_error(f"{self.uri} cannot be read"):
            latest = self._latest()
            candidates = [step for step in self._steps() if newer_than < step <= latest]
        for step in sorted(candidates, reverse=True):
            try:
                with self._as_checkpoint_error(f"{name_of(step)} cannot be fetched from {self.uri}"):
                    checkpoint = store.adopt(step, lambda folder, step=step: self._download(step, folder))  # type: ignore[misc]
            except CheckpointError as error:
                logger.warning("%s; looking for an older one", error)
                continue
            logger.info("fetched %s from %s", checkpoint.name, self.uri)
            return checkpoint
        return None

    def forget(self) -> None:
        """A new run begins: what is stored stays until it is overwritten, but nothing goes on from it."""
        path = posixpath.join(self._root, LATEST)
        if self._files.get_file_info(path).type == FileType.File:
            self._files.delete_file(path)

    def _download(self, step: int, folder: Path) -> None:
        from ray.train import Checkpoint

        Checkpoint(posixpath.join(self._root, name_of(step)), self._files).to_directory(str(folder))

    def _latest(self) -> int:
        """The step that `latest` names, 0 if there is none; any step where it is damaged: all are verified anyway."""
        path = posixpath.join(self._root, LATEST)
        if self._files.get_file_info(path).type != FileType.File:
            return 0
        name = self._get(path).decode(errors="replace").strip()
        if SEALED.fullmatch(name):
            return CheckpointStore.step_of(Path(name))
        logger.warning("%s/%s is damaged: the newest whole checkpoint there counts", self.uri, LATEST)
        return max(self._steps(), default=0)

    def _steps(self) -> list[int]:
        infos = self._files.get_file_info(FileSelector(self._root, allow_not_found=True))
        names = [info.base_name for info in infos if info.type == FileType.Directory]
        return [CheckpointStore.step_of(Path(name)) for name in names if SEALED.fullmatch(name)]

    def _score(self, step: int) -> Score | None:
        path = posixpath.join(self._root, name_of(step), SCORE)
        return Score.parse(self._get(path)) if self._files.get_file_info(path).type == FileType.File else None

    def _is_complete(self, step: int) -> bool:
        """Whether all files are there with their sizes; their bytes stay where they are."""
        folder = posixpath.join(self._root, name_of(step))
        try:
            manifest = json_object(self._get(posixpath.join(folder, MANIFEST)))
            sizes = {info.path: info.size for info in self._files.get_file_info(FileSelector(folder, recursive=True))}
            return all(sizes.get(posixpath.join(folder, name)) == manifest[name]["bytes"] for name in manifest)
        except (FileNotFoundError, ValueError, LookupError, TypeError):
            return False

    def _copy(self, source: Path, target: str) -> None:
        from ray.train._internal.storage import _pyarrow_fs_copy_files

        _pyarrow_fs_copy_files(str(source), target, LocalFileSystem(), self._files)

    def _put(self, path: str, data: bytes) -> None:
        with self._files.open_output_stream(path) as file:
            file.write(data)

    def _get(self, path: str) -> bytes:
        with self._files.open_input_stream(path) as file:
            data: Any = file.read()
        return bytes(data)

    @contextmanager
    def _as_checkpoint_error(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ArrowException) as error:
            raise CheckpointError(f"{what}: {_one_line(error)}") from error


def fetch(uri: str, folder: Path) -> Path:
    """Download the checkpoint at `uri`, or the latest one of a run's folder there, into `folder`; not verified yet.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    from ray.train import Checkpoint
    from ray.train._internal.storage import get_fs_and_path

    try:
        files, path = get_fs_and_path(uri)
        latest = posixpath.join(path, LATEST)
        if files.get_file_info(latest).type == FileType.File:
            with files.open_input_stream(latest) as file:
                path = posixpath.join(path, named_by(file.read(), f"{uri}/{LATEST}"))
        return Path(Checkpoint(path, files).to_directory(str(folder / posixpath.basename(path))))
    except (OSError, ArrowException, ValueError) as error:
        raise CheckpointError(f"checkpoint {uri} cannot be fetched: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
