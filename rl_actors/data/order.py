"""The order in which prompts are drawn: a pure function of their number, the seed and how many came before.

Invariant: within an epoch every prompt is drawn exactly once. Since draw n is known without the draws before it, the
count of trained groups is the whole data cursor of a checkpoint: after a resume nothing is skipped or repeated, prompts
that were in flight included.
"""

from __future__ import annotations

import zlib

import numpy as np


class PromptOrder:
    """Draws indices 0..count-1, epoch after epoch, without end.

    Args:
        count: number of prompts.
        seed: of the shuffling. Each epoch has its own order, made from (seed, epoch).
        shuffle: False draws in the dataset's order every epoch.
    """

    def __init__(self, count: int, seed: int, shuffle: bool = True) -> None:
        if count < 1:
            raise ValueError("an order needs at least one prompt")
        self.count = count
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._order = self._epoch_order(0)

    def index(self, draw: int) -> int:
        """The prompt of draw number `draw`, counted from 0 over all epochs."""
        epoch, position = divmod(draw, self.count)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._epoch_order(epoch)
        return int(self._order[position])

    @property
    def fingerprint(self) -> str:
        """Equal for two orders exactly if they draw alike; kept in checkpoints."""
        first = self._epoch_order(0).astype("<i8").tobytes()
        return f"{self.count}-{zlib.crc32(first):08x}"

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """int64 [count]. Seeded with the pair, not the sum: seed 0's second epoch is not seed 1's first."""
        if not self._shuffle:
            return np.arange(self.count)
        return np.random.default_rng([self._seed, epoch]).permutation(self.count)
