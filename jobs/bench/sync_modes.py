"""Merged weights or the adapter alone: `python -m jobs.bench.sync_modes [RECIPE] [section.key=value ...]`.

Both modes run one after the other with the same base, the same adapters and the same prompts:

    bytes, seconds      of one sync, over all engine workers: the middle of several
    tokens_per_s        sampled by the engines from all prompts at once
    difference, kl      of the engines' log-probabilities of their own answers and the trainer's: the mean |difference|,
                        and the mean of exp(d) - 1 - d with d = trainer - engine, an estimate of KL(engine || trainer)
                        that is never negative (http://joschu.net/blog/kl-approx.html)

Then comes what rounding W + dW to bfloat16 costs (`rounding`). With --json the last line is one line of JSON with the
lists "modes" and "rounding".
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, get_args

import numpy as np

from jobs.bench.rounding import RoundingRow, rounding_rows
from jobs.cli import connect, disconnect, positive, read_recipe, run
from jobs.train import check_cluster
from rl_actors.config import RunConfig, SyncMode
from rl_actors.config_file import parse_config
from rl_actors.preflight import Prepared, prepare

if TYPE_CHECKING:
    from rl_actors.driver.pools import Pools
    from rl_actors.types import TrainBatch

RECIPE = "jobs/configs/quickstart.yaml"
NOISE = 0.02
"""Standard deviation of what is added to A and B, so that the update is not zero."""


@dataclass(frozen=True)
class ModeRow:
    """What one mode measured; see the module's docstring."""

    mode: SyncMode
    transport: str
    bytes: int
    seconds: float
    transfer_s: float
    peak_extra_bytes: int
    tokens: int
    tokens_per_s: float
    difference: float
    largest_difference: float
    kl: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="*", help=f"recipe (default {RECIPE}) and overrides such as trainer.ep=2")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--syncs", type=positive, default=5, help="syncs of each mode (default 5)")
    parser.add_argument("--prompts", type=positive, default=32, help="prompts, each sampled samples_per_prompt times")
    parser.add_argument("--no-rounding", action="store_true", help="leave the study of bfloat16 rounding out")
    arguments = parser.parse_intermixed_args()
    words = arguments.recipe
    recipe, overrides = (words[0], words[1:]) if words and "=" not in words[0] else (RECIPE, words)
    configs = configs_of_both_modes(read_recipe(recipe, overrides))
    prepared = [prepare(config) for config in configs]
    connect()
    for one in prepared:
        check_cluster(one.config)
    modes = [asyncio.run(measure(one, arguments.syncs, arguments.prompts)) for one in prepared]
    disconnect()
    rounding = [] if arguments.no_rounding else study_rounding(prepared[0].config)
    show(modes, rounding)
    if arguments.json:
        print(json.dumps({"modes": [asdict(row) for row in modes], "rounding": [row.as_dict() for row in rounding]}))
    return 0


def configs_of_both_modes(config: RunConfig) -> list[RunConfig]:
    """The recipe with `sync.mode` merged, and adapter.

    Raises:
        ConfigError: one of them takes no such recipe.
    """
    tree = config.model_dump()
    return [
        parse_config({**tree, "sync": {**tree["sync"], "mode": mode}}, f"the recipe with sync.mode={mode}")
        for mode in get_args(SyncMode)
    ]


async def measure(prepared: Prepared, syncs: int, prompts: int) -> ModeRow:
    """Start the recipe's pools and measure them."""
    from rl_actors.driver.pools import start_pools

    config, mode = prepared.config, prepared.config.sync.mode
    async with start_pools(config, f"{config.run_path.name}-{mode}") as pools:
        await pools.rollout.pause()
        await pools.sync.set_up(check_base=True)
        reports = []
        for version in range(1, syncs + 1):
            await pools.trainer.perturb_adapters(version, NOISE / syncs**0.5)
            reports.append(await pools.sync.run(version))
        await _sample(pools, prepared, config, prompts)  # kernels and caches are warm after it
        started = time.perf_counter()
        batch = await _sample(pools, prepared, config, prompts)
        sampling_s = time.perf_counter() - started
        difference = (await pools.trainer.compute_logprobs(batch)) - batch.sampler_logprobs
        return ModeRow(
            mode=mode,
            transport=reports[-1].transport,
            bytes=reports[-1].bytes,
            seconds=median(report.seconds for report in reports),
            transfer_s=median(report.transfer_s for report in reports),
            peak_extra_bytes=max(report.peak_extra_bytes for report in reports),
            tokens=len(difference),
            tokens_per_s=len(difference) / sampling_s,
            difference=float(np.abs(difference).mean()),
            largest_difference=float(np.abs(difference).max()),
            kl=float((np.expm1(difference) - difference).mean()),
        )


async def _sample(pools: Pools, prepared: Prepared, config: RunConfig, prompts: int) -> TrainBatch:
    """Answers of the engines as a batch that the trainer can score."""
    from rl_actors.algorithms.batching import make_train_batch
    from rl_actors.driver.together import together
    from rl_actors.types import TrajectoryGroup

    samples = config.pipeline.samples_per_prompt
    chosen = prepared.train_prompts[:prompts]
    answers = await together(pools.rollout.generate(prompt, samples, config.seed) for prompt in chosen)
    rewards = np.arange(samples, dtype=np.float32)
    groups = [TrajectoryGroup(p, tuple(a), rewards) for p, a in zip(chosen, answers, strict=True)]
    batch, _ = make_train_batch(groups, config.algorithm)
    assert batch is not None
    return batch


def study_rounding(config: RunConfig) -> list[RoundingRow]:
    """On the recipe's model, with its rank and scale."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return rounding_rows(
        Path(config.model.path), config.lora.rank, config.lora.alpha / config.lora.rank, config.seed, device
    )


def show(modes: list[ModeRow], rounding: list[RoundingRow]) -> None:
    """The tables for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table("mode", "MB", "sync s", "tokens/s", "mean |difference|", "KL", title="Sync modes", box=None)
    for row in modes:
        table.add_row(
            row.mode,
            f"{row.bytes / 1e6:.3f}",
            f"{row.seconds:.4f}",
            f"{row.tokens_per_s:.0f}",
            f"{row.difference:.2e}",
            f"{row.kl:.2e}",
        )
    Console(width=120).print(table)
    if rounding:
        table = Table("B", "rounding", "error", "survives", "KL", "KL of dW", title="W + dW in bfloat16", box=None)
        for one in rounding:
            table.add_row(
                f"{one.b_size:g}",
                one.rounding,
                f"{one.error:.3f}",
                f"{one.survives:.3f}",
                f"{one.kl:.2e}",
                f"{one.kl_of_update:.2e}",
            )
        Console(width=120).print(table)


if __name__ == "__main__":
    run(main)
