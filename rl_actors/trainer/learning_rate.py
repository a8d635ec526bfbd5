"""The learning rate of a step: a function of the step alone, so a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from rl_actors.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Rate of optimizer step `step` (from 0): linear warm-up, then constant, linear or cosine down to `min_lr`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(1, total_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / span)
    share = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_lr + (config.lr - config.min_lr) * share
