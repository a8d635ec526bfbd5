"""Write a safetensors file tensor by tensor, so that a file of many gigabytes needs the memory of one tensor.

`safetensors.torch.save_file` wants all tensors at once. The format is plain: eight bytes with the length of a JSON
header, the header, then the tensors' bytes in a row. Invariant: the context ends without an error only if every
announced tensor was written, once and in order, with the announced type and shape, and all bytes are on disk.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch

from rl_actors.digests import Digest

TYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Names of types in the format."""

_NAMES = {dtype: name for name, dtype in TYPES.items()}


class SafetensorsWriter:
    """A context manager; `layout` gives type and shape of each tensor in the order in which `write` gets them.

    Attributes:
        digest: of the whole file, once the context has ended.
    """

    def __init__(
        self,
        path: Path,
        layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._layout = dict(layout)
        self._waiting = list(reversed(self._layout))
        header: dict[str, object] = {"__metadata__": dict(metadata or {"format": "pt"})}
        offset = 0
        for name, (dtype, shape) in self._layout.items():
            end = offset + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors start at a multiple of eight bytes
        self._file = path.open("wb")
        self._hash, self._bytes = hashlib.sha256(), 0
        self._put(len(text).to_bytes(8, "little") + text)

    @property
    def digest(self) -> Digest:
        return {"bytes": self._bytes, "sha256": self._hash.hexdigest()}

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append the next tensor; it is cast to the announced type."""
        expected = self._waiting.pop() if self._waiting else None
        dtype, shape = self._layout.get(name, (None, None))
        if name != expected or tuple(tensor.shape) != shape:
            raise ValueError(f"got {name} {list(tensor.shape)}, announced was {expected} {shape}")
        raw = tensor.detach().to("cpu", dtype).contiguous().reshape(-1).view(torch.uint8)
        self._put(raw.numpy().data)

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._bytes += len(data)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        if error is None and self._waiting:
            raise ValueError(f"{len(self._waiting)} announced tensors were not written, such as {self._waiting[-1]}")
