"""What a file must hold: its size and SHA-256, as its writer had the bytes in memory or as they lie on disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict


class Digest(TypedDict):
    bytes: int
    sha256: str


def write_bytes(path: Path, data: bytes) -> Digest:
    """Write a file, forced to disk; the digest is that of `data`."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def digest_of(path: Path) -> Digest:
    """Of the file as it lies on disk."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def digests_of(paths: Iterable[Path]) -> list[Digest]:
    """Of many files, several at a time."""
    with ThreadPoolExecutor(max_workers=8) as threads:
        return list(threads.map(digest_of, paths))
