"""What travels between the pools, in the order of a prompt's way.

`Prompt` -> rollout -> `Trajectory` -> reward -> `TrajectoryGroup` -> logprobs and advantages -> `TrainBatch`.

Sampled token ids are never decoded and encoded again. Arrays are numpy, so Ray moves them without a copy.
In a `TrainBatch` everything per token is *response-flat*: one value for each sampled token of each sequence,
sequences one after the other. The shape suffix is R (all response tokens), N (sequences) or L (all tokens).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Prompt:
    """One row of the dataset, ready to be sampled from.

    Attributes:
        id: unique in the dataset, stable between runs (row number unless the data names one).
        token_ids: int32 [P], the chat template already applied.
        text: the user's question as text (rewards may read it).
        answer: the reference answer as the dataset holds it.
        metadata: the row's other columns (reasoning-gym entries keep theirs here).
    """

    id: str
    token_ids: np.ndarray
    text: str
    answer: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trajectory:
    """One sampled answer.

    Attributes:
        prompt_id: the `Prompt.id` it answers.
        token_ids: int32 [T], the sampled tokens, the stop token included.
        logprobs: float32 [T], the sampler's log-probability of each token as it was sampled
            (temperature and truncation applied).
        versions: int32 [T], the weight version that sampled each token.
        finish_reason: "stop" or "length".
        text: the decoded answer, special tokens left out; for rewards and people only.
    """

    prompt_id: str
    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: str
    text: str

    @property
    def oldest_version(self) -> int:
        return int(self.versions.min())


@dataclass(frozen=True)
class TrajectoryGroup:
    """All samples of one prompt with their rewards (float32 [G])."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    rewards: np.ndarray

    @property
    def oldest_version(self) -> int:
        return min(trajectory.oldest_version for trajectory in self.trajectories)


@dataclass(frozen=True)
class TrainBatch:
    """Sequences of one optimizer step, response-flat.

    Attributes:
        tokens: int32 [L], prompt and response of each sequence, sequences one after the other.
        prompt_lengths: int32 [N].
        response_lengths: int32 [N], each at least 1.
        sampler_logprobs: float32 [R].
        advantages: float32 [R].
        old_logprobs: float32 [R], by the trainer before this step's first update; None until computed.
        ref_logprobs: float32 [R], by the trainer with its adapters off; None when KL is off.
        loss_weights: float32 [R], what each token's loss is multiplied with; they hold the whole batch's
            normalisation, so a loss is a plain sum whatever the micro-batches and ranks are.
    """

    tokens: np.ndarray
    prompt_lengths: np.ndarray
    response_lengths: np.ndarray
    sampler_logprobs: np.ndarray
    advantages: np.ndarray
    loss_weights: np.ndarray
    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> np.ndarray:
        """int32 [N]: prompt plus response."""
        return self.prompt_lengths + self.response_lengths

    @property
    def token_offsets(self) -> np.ndarray:
        """int64 [N+1]: sequence i owns tokens[offsets[i]:offsets[i+1]]."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    @property
    def response_offsets(self) -> np.ndarray:
        """int64 [N+1]: sequence i owns responses[offsets[i]:offsets[i+1]] of every response-flat array."""
        return np.concatenate([[0], np.cumsum(self.response_lengths, dtype=np.int64)])

    def select(self, indices: np.ndarray) -> TrainBatch:
        """The sub-batch of some sequences, in the order given. Loss weights are kept as they are."""
        token_index = _ranges(self.token_offsets, indices)
        response_index = _ranges(self.response_offsets, indices)

        def responses(array: np.ndarray | None) -> np.ndarray | None:
            return None if array is None else array[response_index]

        return replace(
            self,
            tokens=self.tokens[token_index],
            prompt_lengths=self.prompt_lengths[indices],
            response_lengths=self.response_lengths[indices],
            sampler_logprobs=self.sampler_logprobs[response_index],
            advantages=self.advantages[response_index],
            loss_weights=self.loss_weights[response_index],
            old_logprobs=responses(self.old_logprobs),
            ref_logprobs=responses(self.ref_logprobs),
        )


def _ranges(offsets: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """The flat positions of some sequences, given the offsets of all."""
    if len(indices) == 0:
        return np.zeros(0, dtype=np.int64)
    return np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in indices])
