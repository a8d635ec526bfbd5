"""One message from rank 0 of a group to all others, the same way over every transport."""

from __future__ import annotations

import torch

from rl_actors.weight_sync.collective import CollectiveGroup, Pending

BUFFERS = 2


def spread(group: CollectiveGroup, message: torch.Tensor, receivers: int, number: int) -> list[Pending]:
    """Start sending; the buffer is free when all are waited for."""
    if group.keeps_buffers:  # members map each other's memory: they are told where it is
        return [group.isend(message, 1 + receiver, number) for receiver in range(receivers)]
    return [group.ibroadcast(message, 0)]


def expect(group: CollectiveGroup, message: torch.Tensor, number: int) -> Pending:
    """Start receiving what rank 0 spreads."""
    return group.irecv(message, 0, number) if group.keeps_buffers else group.ibroadcast(message, 0)


def finish(pending: list[Pending]) -> None:
    """Wait for all of them, and forget them."""
    while pending:
        pending.pop(0).wait()
