"""What a user of the libraries does: Bridge exports merged Hugging Face tensors, vLLM loads them.

Rank 0 packs the tensors into buckets and broadcasts each to all engine workers, two buffers in turn. The workers feed
them to vLLM's own loader through its layerwise reload, as vLLM's own weight transfer engines do.

Bridge 0.6.2 merges experts that are modules of their own (CPU) with the adapters of the local rank: with trainer.ep > 1
its values are wrong there, its time is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jobs.bench.spread import BUFFERS, expect, finish, spread
from rl_actors.weight_sync.collective import CollectiveGroup, Pending, join_group, leave_group

ALIGNMENT = 16


@dataclass(frozen=True)
class Named:
    """A Hugging Face tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def space(self) -> int:
        """Bytes in a bucket."""
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT


def buckets(tensors: Sequence[Named], limit: int) -> list[list[Named]]:
    """Consecutive tensors, as many as fit into `limit` bytes; a larger one alone."""
    result: list[list[Named]] = []
    filled = limit
    for tensor in tensors:
        if filled + tensor.space > limit:
            result.append([])
            filled = 0
        result[-1].append(tensor)
        filled += tensor.space
    return result


def size(bucket: Sequence[Named]) -> int:
    return sum(tensor.space for tensor in bucket)


class LibrarySender:
    """In a trainer rank. All ranks export, which is a collective; rank 0 sends."""

    def __init__(self, worker: Any) -> None:
        self._model = worker.model
        self._group: CollectiveGroup | None = None
        self._buffers: list[torch.Tensor] = []
        self._receivers = 0

    def describe(self) -> list[Named]:
        """Names and shapes, in the order of the export."""
        return [Named(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self._export()]

    def join(self, name: str, rank: int, receivers: int, device: str, transport: str, timeout_s: float) -> None:
        if rank == 0:
            self._receivers = receivers
            self._group = join_group(name, 0, 1 + receivers, device, timeout_s, transport)

    def leave(self) -> None:
        if self._group is not None:
            self._buffers = []
            leave_group(self._group.group_name)

    def send(self, plan: list[list[Named]]) -> None:
        weights = self._export()
        group = self._group
        if group is not None and not (group.keeps_buffers and self._buffers):
            self._buffers = [group.allocate(max(map(size, plan))) for _ in range(BUFFERS)]
        travelling: list[list[Pending]] = [[] for _ in range(BUFFERS)]
        for number, bucket in enumerate(plan):
            slot = number % BUFFERS
            finish(travelling[slot])
            start = 0
            for tensor in bucket:
                name, value = next(weights)
                assert name == tensor.name, f"{name} came, {tensor.name} was announced"
                if group is not None:
                    self._buffers[slot][start : start + tensor.nbytes].copy_(
                        value.contiguous().view(-1).view(torch.uint8)
                    )
                start += tensor.space
            if group is not None:
                travelling[slot] = spread(group, self._buffers[slot][:start], self._receivers, number)
        for pending in travelling:
            finish(pending)
        if group is not None and not group.keeps_buffers:
            self._buffers = []

    def _export(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._model.bridge.export_hf_weights(self._model.chunks, cpu=False, show_progress=False))


class LibraryReceiver:
    """In an engine worker."""

    def __init__(self, worker: Any) -> None:
        self._model, self._model_config = worker.get_model(), worker.model_config
        self._device = next(self._model.parameters()).device
        self._group: CollectiveGroup | None = None

    def join(self, name: str, rank: int, receivers: int, device: str, transport: str, timeout_s: float) -> None:
        self._group = join_group(name, 1 + rank, 1 + receivers, device, timeout_s, transport)

    def leave(self) -> None:
        if self._group is not None:
            leave_group(self._group.group_name)

    def receive(self, plan: list[list[Named]]) -> int:
        """Returns the bytes received."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        initialize_layerwise_reload(self._model)
        coming = self._post(plan, 0)
        for number, bucket in enumerate(plan):
            message, pending = coming
            pending.wait()
            if number + 1 < len(plan):
                coming = self._post(plan, number + 1)
            self._model.load_weights(_unpack(message, bucket))
        finalize_layerwise_reload(self._model, self._model_config)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return sum(map(size, plan))

    def _post(self, plan: list[list[Named]], number: int) -> tuple[torch.Tensor, Pending]:
        assert self._group is not None
        # A new buffer for each: the layerwise reload keeps the tensors until their layer is whole.
        message = torch.empty(size(plan[number]), dtype=torch.uint8, device=self._device)
        return message, expect(self._group, message, number)


def _unpack(message: torch.Tensor, bucket: list[Named]) -> Iterator[tuple[str, torch.Tensor]]:
    start = 0
    for tensor in bucket:
        yield tensor.name, message[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += tensor.space
