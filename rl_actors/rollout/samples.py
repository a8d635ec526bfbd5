"""How an answer is sampled, and one answer while it is being sampled. Pure data, no vLLM.

Every sample has a seed of its own, made from (seed, prompt id, sample index). What else is in the batch, which
engine answers, and in which order prompts arrive then change nothing but floating-point rounding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rl_actors.config import RolloutConfig
from rl_actors.types import Prompt, Trajectory


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens. Fields as in `RolloutConfig`; temperature 0 takes the most likely token."""

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()

    @classmethod
    def for_training(cls, rollout: RolloutConfig) -> Sampling:
        return cls(rollout.temperature, rollout.max_new_tokens, rollout.top_p, rollout.top_k, rollout.stop)

    def with_temperature(self, temperature: float) -> Sampling:
        """The same but for the temperature, as an evaluation wants it."""
        return replace(self, temperature=temperature)


def sample_seed(seed: int, prompt_id: str, index: int) -> int:
    """A 63-bit seed for sample `index` of a prompt, equal on every machine and in every run."""
    digest = hashlib.blake2b(f"{seed}/{index}/{prompt_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(eq=False)
class Sample:
    """One answer under way: what vLLM sampled so far, and under which weight version."""

    request_id: str
    prompt: Prompt
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def append(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Take the tokens of one engine step."""
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.versions.extend([version] * len(token_ids))

    def trajectory(self, text: str) -> Trajectory:
        """The finished answer; `text` is its decoded form."""
        assert self.finish_reason is not None, f"sample {self.request_id} is not finished"
        return Trajectory(
            prompt_id=self.prompt.id,
            token_ids=np.asarray(self.token_ids, dtype=np.int32),
            logprobs=np.asarray(self.logprobs, dtype=np.float32),
            versions=np.asarray(self.versions, dtype=np.int32),
            finish_reason=self.finish_reason,
            text=text,
        )
