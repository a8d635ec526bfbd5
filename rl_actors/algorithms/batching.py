"""From scored groups to the batch of one optimizer step.

Invariants: a batch holds the sampled token ids as they were sampled; every response token has its answer's advantage;
the loss weights of a batch add up to 1, over exactly the tokens that are in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from rl_actors.algorithms.advantages import group_advantages, is_uniform
from rl_actors.algorithms.losses import loss_weights
from rl_actors.config import AlgorithmConfig
from rl_actors.types import TrainBatch, Trajectory, TrajectoryGroup


@dataclass(frozen=True)
class BatchStats:
    """What went into a batch. Rewards and lengths are over all groups, those left out included.

    Attributes:
        groups: groups given.
        uniform_groups: groups whose answers all have the same reward.
        dropped_groups: groups left out of the batch for that.
        sequences, response_tokens: what the batch holds (0 without a batch).
        reward_mean, reward_std: over all answers (population standard deviation).
        response_length_mean: tokens.
        truncated_fraction: answers that ended at the length limit.
    """

    groups: int
    uniform_groups: int
    dropped_groups: int
    sequences: int
    response_tokens: int
    reward_mean: float
    reward_std: float
    response_length_mean: float
    truncated_fraction: float


def make_train_batch(groups: list[TrajectoryGroup], config: AlgorithmConfig) -> tuple[TrainBatch | None, BatchStats]:
    """Flatten groups into one batch, with advantages and loss weights; logprobs of the trainer come later.

    Returns:
        (batch, stats). The batch is None if no group is left, that is when all are uniform and those are dropped.

    Raises:
        ValueError: no groups, rewards that do not match the answers, or logprobs that do not match the tokens.
    """
    if not groups:
        raise ValueError("a batch needs at least one group")
    rewards = [_checked_rewards(group) for group in groups]
    uniform = [is_uniform(values) for values in rewards]
    kept = [i for i in range(len(groups)) if not (config.drop_uniform_groups and uniform[i])]
    batch = _flatten([groups[i] for i in kept], [rewards[i] for i in kept], config) if kept else None
    return batch, _stats(groups, torch.cat(rewards), sum(uniform), len(groups) - len(kept), batch)


def split_batch(batch: TrainBatch, parts: int, config: AlgorithmConfig) -> list[TrainBatch]:
    """Cut a batch into mini-batches of whole sequences (`updates_per_batch`), each with loss weights of its own.

    Sequence i goes to part i mod parts, so the answers of one prompt spread over the updates. Old and reference
    logprobs go along: they must be computed on the whole batch before its first update. With fewer sequences than
    parts there are as many parts as sequences.
    """
    if parts == 1:
        return [batch]
    pieces = [batch.select(np.arange(part, len(batch), parts)) for part in range(min(parts, len(batch)))]
    return [
        replace(piece, loss_weights=loss_weights(piece.response_lengths, config.loss_reduction)) for piece in pieces
    ]


def _checked_rewards(group: TrajectoryGroup) -> torch.Tensor:
    if group.rewards.shape != (len(group.trajectories),):
        raise ValueError(
            f"prompt {group.prompt.id}: rewards of shape {group.rewards.shape} for {len(group.trajectories)} answers"
        )
    for answer in group.trajectories:
        tokens, logprobs = len(answer.token_ids), len(answer.logprobs)
        if not 1 <= tokens == logprobs:
            raise ValueError(f"prompt {group.prompt.id}: an answer of {tokens} tokens has {logprobs} logprobs")
    return torch.from_numpy(np.array(group.rewards, dtype=np.float32))


def _flatten(groups: list[TrajectoryGroup], rewards: list[torch.Tensor], config: AlgorithmConfig) -> TrainBatch:
    pairs = [(group.prompt, trajectory) for group in groups for trajectory in group.trajectories]
    response_lengths = np.array([len(trajectory.token_ids) for _, trajectory in pairs], dtype=np.int32)
    advantages_N = torch.cat([group_advantages(values, config.advantage) for values in rewards]).numpy()
    tokens = [part for prompt, trajectory in pairs for part in (prompt.token_ids, trajectory.token_ids)]
    return TrainBatch(
        tokens=np.concatenate(tokens).astype(np.int32, copy=False),
        prompt_lengths=np.array([len(prompt.token_ids) for prompt, _ in pairs], dtype=np.int32),
        response_lengths=response_lengths,
        sampler_logprobs=np.concatenate([trajectory.logprobs for _, trajectory in pairs]).astype(
            np.float32, copy=False
        ),
        advantages=np.repeat(advantages_N, response_lengths),
        loss_weights=loss_weights(response_lengths, config.loss_reduction),
    )


def _stats(
    groups: list[TrajectoryGroup], rewards: torch.Tensor, uniform: int, dropped: int, batch: TrainBatch | None
) -> BatchStats:
    answers: list[Trajectory] = [trajectory for group in groups for trajectory in group.trajectories]
    return BatchStats(
        groups=len(groups),
        uniform_groups=uniform,
        dropped_groups=dropped,
        sequences=len(batch) if batch else 0,
        response_tokens=int(batch.response_lengths.sum()) if batch else 0,
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std(unbiased=False)),
        response_length_mean=float(np.mean([len(answer.token_ids) for answer in answers])),
        truncated_fraction=float(np.mean([answer.finish_reason == "length" for answer in answers])),
    )
