"""Every error a user can meet, in one place. A message says what, where, and what to do instead."""

from typing import Any


class RLActorsError(Exception):
    """Base of all errors raised on purpose by this project."""


class ConfigError(RLActorsError):
    """The configuration, dataset, model folder or reward cannot work; nothing was started."""


class PlacementError(RLActorsError):
    """The cluster cannot hold the plan, or an actor sits where the plan does not say."""


class ActorLateError(RLActorsError):
    """An actor did not answer within its timeout."""


class ActorDiedError(RLActorsError):
    """An actor, or the process under it, is gone."""


class RewardError(RLActorsError):
    """A reward function raised or returned something that is not a finite number."""


class TrainingError(RLActorsError):
    """A training step is not usable: zero or non-finite gradients, or a non-finite loss."""


class SyncError(RLActorsError):
    """A weight sync did not complete on every engine; its version is never served."""


class CheckpointError(RLActorsError):
    """A checkpoint is missing, truncated, or belongs to another model."""


def shown(value: Any) -> str:
    """The value as a person wrote it, cut to a length that fits in a sentence."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python refuses to write integers of thousands of digits
        return f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= 200 else text[:197] + "..."
