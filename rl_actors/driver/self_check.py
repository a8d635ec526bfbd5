"""Are the weights right, on this model, this layout and this cluster? The checks behind `jobs.verify`.

Each check compares two independent computations of the same log-probabilities: trainer with and without adapters,
trainer and engine, trainer and the exported model in transformers. Adapters are made nonzero by one real update and
seeded noise first, so that a merge that does nothing cannot pass.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rl_actors.algorithms.batching import make_train_batch
from rl_actors.config import RunConfig
from rl_actors.driver.pools import Pools
from rl_actors.driver.together import together
from rl_actors.errors import RLActorsError
from rl_actors.rollout.samples import Sampling
from rl_actors.types import Prompt, TrainBatch, TrajectoryGroup

SAMPLES = 4
ANSWER_TOKENS = 64
NOISE = 0.02


@dataclass(frozen=True)
class Tolerances:
    """Greatest allowed differences of log-probabilities, by the type of the weights."""

    mean: float
    largest: float

    @classmethod
    def of(cls, dtype: str, moe: bool) -> Tolerances:
        """float32 kernels agree to rounding. In bfloat16 single tokens of an MoE may be routed differently."""
        if dtype == "float32":
            return cls(mean=1e-4, largest=1e-4)
        return cls(mean=0.05, largest=float("inf")) if moe else cls(mean=0.02, largest=float("inf"))


@dataclass(frozen=True)
class Check:
    """One row of the table; `value` must not exceed `tolerance`, or, for a floor, must exceed it."""

    name: str
    value: float
    tolerance: float
    floor: bool = False

    @property
    def ok(self) -> bool:
        return self.value > self.tolerance if self.floor else self.value <= self.tolerance


async def self_check(
    config: RunConfig, pools: Pools, prompts: Sequence[Prompt], tolerances: Tolerances, with_export: bool
) -> list[Check]:
    """All checks, on started pools whose engines hold the base model.

    Args:
        prompts: a few of the run's.
        with_export: also load the exported model with transformers in this process (small models only).
    """
    rollout, trainer, sync = pools.rollout, pools.trainer, pools.sync
    await rollout.pause()
    base = await sync.set_up(check_base=True)
    await rollout.resume(0)
    # `set_up` raises if one of them differs; here it counts that they were compared at all.
    checks = [Check("base weights equal bit for bit, elements", float(base.compared if base else 0), 0.0, floor=True)]

    batch = await _sampled_batch(config, pools, prompts)
    adapted, plain = await _both_logprobs(pools, batch)
    checks.append(Check("step 0: adapted - base, max", _largest(adapted - plain), 0.0))
    checks += _compare("before training: engine - trainer", batch.sampler_logprobs - adapted, tolerances)

    metrics = await trainer.update(replace(batch, old_logprobs=adapted, ref_logprobs=plain))
    checks += [
        Check(f"gradient of {name.removeprefix('grad_norm/')}", value, 0.0, floor=True)
        for name, value in sorted(metrics.items())
        if name.startswith("grad_norm/")
    ]

    await trainer.perturb_adapters(config.seed, NOISE)
    moved = (await trainer.compute_logprobs(batch)) - plain
    checks.append(Check("nonzero adapters: adapted - base, max", _largest(moved), 10 * tolerances.mean, floor=True))
    report = await sync.run(1)
    batch = await _sampled_batch(config, pools, prompts)
    merged = await trainer.compute_logprobs(batch)
    checks += _compare("after sync: engine - trainer", batch.sampler_logprobs - merged, tolerances)
    checks.append(Check("after sync: bytes received", float(report.bytes), 0.0, floor=True))
    if with_export:
        exported = await _exported_logprobs(config, pools, batch)
        checks += _compare("exported model - trainer", exported - merged, tolerances)
    return checks


async def _sampled_batch(config: RunConfig, pools: Pools, prompts: Sequence[Prompt]) -> TrainBatch:
    """Answers sampled by the engines, with advantages that give every sequence a gradient."""
    sampling = replace(
        Sampling.for_training(config.rollout), max_new_tokens=min(ANSWER_TOKENS, config.rollout.max_new_tokens)
    )
    answers = await together(pools.rollout.generate(p, SAMPLES, config.seed, sampling) for p in prompts)
    rewards = np.arange(SAMPLES, dtype=np.float32)
    groups = [TrajectoryGroup(p, tuple(a), rewards) for p, a in zip(prompts, answers, strict=True)]
    batch, _ = make_train_batch(groups, config.algorithm)
    if batch is None:
        raise RLActorsError("the engines answered no prompt")
    return batch


async def _both_logprobs(pools: Pools, batch: TrainBatch) -> tuple[np.ndarray, np.ndarray]:
    return await pools.trainer.compute_logprobs(batch), await pools.trainer.compute_logprobs(batch, adapters=False)


async def _exported_logprobs(config: RunConfig, pools: Pools, batch: TrainBatch) -> np.ndarray:
    """float32 [R]: the batch scored by transformers with the merged model that `jobs.export` writes."""
    from rl_actors.trainer.export import export_merged

    with tempfile.TemporaryDirectory(prefix="rl_actors-verify-") as folder:
        checkpoint, model = Path(folder) / "checkpoint", Path(folder) / "model"
        checkpoint.mkdir()
        await pools.trainer.save(str(checkpoint))
        await asyncio.to_thread(export_merged, Path(config.model.path), checkpoint, model)
        return await asyncio.to_thread(_score, model, config, batch)


def _score(model_path: Path, config: RunConfig, batch: TrainBatch) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, config.model.dtype)).eval()
    values = []
    with torch.no_grad():
        for index, start in enumerate(batch.token_offsets[:-1]):
            tokens = torch.from_numpy(batch.tokens[start : batch.token_offsets[index + 1]].astype(np.int64))
            logits = model(tokens[None]).logits[0, :-1].float() / config.rollout.temperature
            logprobs = torch.log_softmax(logits, dim=-1).gather(1, tokens[1:, None])[:, 0]
            values.append(logprobs[batch.prompt_lengths[index] - 1 :].numpy())
    return np.concatenate(values)


def _compare(name: str, difference: np.ndarray, tolerances: Tolerances) -> list[Check]:
    return [
        Check(f"{name}, mean", float(np.abs(difference).mean()), tolerances.mean),
        Check(f"{name}, max", _largest(difference), tolerances.largest),
    ]


def _largest(difference: np.ndarray) -> float:
    return float(np.abs(difference).max())
