"""Where a rank's shard lies in a full tensor, and how shards become the full tensor again. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Slice:
    """Where a shard lies in its full tensor: part `rank` of `size` equal parts of `axis`.

    Attributes:
        gated: the full axis is two halves (gate, up) and the shard holds its part of both, one after the other.
    """

    axis: int
    rank: int
    size: int
    gated: bool = False

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """Cut this shard out of the full tensor."""
        if self.size == 1:
            return full
        halves = full.chunk(2, dim=self.axis) if self.gated else (full,)
        return torch.cat([half.chunk(self.size, dim=self.axis)[self.rank] for half in halves], dim=self.axis)

    def join(self, shards: list[torch.Tensor]) -> torch.Tensor:
        """The full tensor from all `size` shards, in rank order."""
        if not self.gated:
            return torch.cat(shards, dim=self.axis)
        halves = [shard.chunk(2, dim=self.axis) for shard in shards]
        return torch.cat([half[part] for part in (0, 1) for half in halves], dim=self.axis)
