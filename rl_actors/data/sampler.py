"""The order in which a run draws its prompts, as a pure function of how many were drawn before.

Invariant: the n-th draw of a run is the same prompt in every process and after every resume, and within an epoch every
prompt is drawn exactly once. So the number of prompts trained is the whole data cursor: what was in flight at a
checkpoint has a higher number and is drawn again, and nothing is skipped or repeated.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

import numpy as np

from rl_actors.errors import CheckpointError


class PromptSampler:
    """Maps the number of a draw (0, 1, ... without end) to the index of a prompt.

    Args:
        count: number of prompts.
        seed: of the shuffling. Each epoch has its own order, made from the pair (seed, epoch).
        shuffle: False draws in the dataset's order every epoch.
    """

    def __init__(self, count: int, seed: int = 0, shuffle: bool = True) -> None:
        if count < 1:
            raise ValueError("a sampler needs at least one prompt")
        self.count = count
        self.seed = seed
        self.shuffle = shuffle
        # Draws of two neighbouring epochs are in flight at the same time.
        self._order = functools.lru_cache(maxsize=4)(self._epoch_order)

    def index(self, number: int) -> int:
        """Index of the prompt of draw `number`, in 0..count-1."""
        epoch, position = divmod(number, self.count)
        return int(self._order(epoch)[position])

    def state_dict(self) -> dict[str, Any]:
        """What the order depends on, as JSON-ready values. The cursor is not part of it: it is a number of draws."""
        return {
            "count": self.count,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "order_checksum": zlib.crc32(self._order(0).astype("<i8").tobytes()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the saved order, so that draws go on as they would have.

        Raises:
            CheckpointError: the dataset has another number of prompts, or the saved order cannot be made again.
        """
        if state["count"] != self.count:
            raise CheckpointError(
                f"the checkpoint was written with {state['count']} prompts and the dataset now has {self.count}: "
                "resume with the same data, or start a new run"
            )
        self.seed, self.shuffle = state["seed"], state["shuffle"]
        self._order.cache_clear()
        if self.state_dict()["order_checksum"] != state["order_checksum"]:
            # numpy may change its generators between releases.
            raise CheckpointError(
                "the order of the prompts differs from the checkpoint's: resume with the numpy release that wrote it"
            )

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """int64 [count]. Seeded with the pair, not the sum: seed 0's second epoch is not seed 1's first."""
        if not self.shuffle:
            return np.arange(self.count)
        return np.random.default_rng([self.seed, epoch]).permutation(self.count)
