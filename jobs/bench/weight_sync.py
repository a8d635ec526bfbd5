"""Weight sync beside its alternatives, in one run: `python -m jobs.bench.weight_sync [RECIPE] [section.key=value ...]`.

`library` is Bridge's export and vLLM's loader, `broadcast` our merge with one sender, `shard_to_shard` the sync of this
project, and `floor` a copy of as many bytes within one device's memory, on every engine worker at once. All take the
same trainer, engines and adapters, in turns; the table has the median of the repeats. Without a recipe: two trainer
ranks and two engines on CPU, and a model of 200 MB with as many experts a layer as Qwen3-30B-A3B. With --json the last
line is one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jobs.cli import connect, disconnect, positive, read_recipe, run
from jobs.train import check_cluster
from rl_actors.config import RunConfig
from rl_actors.errors import ConfigError
from rl_actors.preflight import check_files, check_model, with_absolute_paths

if TYPE_CHECKING:
    from rl_actors.driver.pools import Pools

DEFAULT_RECIPE = Path(__file__).with_suffix(".yaml")
NOISE = 0.02
PROMPTS, PROMPT_TOKENS, SAMPLES = 4, 8, 2


@dataclass(frozen=True)
class Row:
    """One way.

    Attributes:
        seconds: the median, from the control call to the last acknowledgement.
        bytes: that arrived, over all engine workers.
        peak_extra_bytes: of the actor, on either side, that needed most beyond what it had before.
    """

    name: str
    seconds: float
    gb_per_s: float
    bytes: int
    peak_extra_bytes: int


@dataclass
class Measured:
    """What the repeats of one way gave."""

    seconds: list[float]
    nbytes: int = 0
    peak: int = 0
    difference: float | None = None

    def row(self, name: str) -> Row:
        median = statistics.median(self.seconds)
        return Row(name, median, self.nbytes / median / 1e9, self.nbytes, self.peak)


def main() -> int:
    arguments = _parser().parse_intermixed_args()
    from rl_actors.tracking.console import configure_logging

    configure_logging()
    config = prepare(arguments.config, arguments.overrides, arguments.model, arguments.layers)
    connect()
    check_cluster(config)
    measured, notes = asyncio.run(bench(config, arguments.repeats))
    # Actors' last log lines come before the result, not behind it.
    disconnect()
    show(measured, notes)
    if arguments.json:
        print(json.dumps({"rows": [asdict(one.row(name)) for name, one in measured.items()]}))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default=str(DEFAULT_RECIPE), help="recipe (default: the CPU one)")
    parser.add_argument("overrides", nargs="*", help="section.key=value, such as trainer.ep=2")
    parser.add_argument("--model", help="model folder, or shape:qwen3-30b-a3b (model.random_weights=true)")
    parser.add_argument("--layers", type=positive, help="cut the model to so many layers, with random weights")
    parser.add_argument("--repeats", type=positive, default=5, help="of each way (default 5)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser


def prepare(recipe: str, overrides: Sequence[str], model: str | None = None, layers: int | None = None) -> RunConfig:
    """The checked configuration of the run. Raises ConfigError."""
    if "=" in recipe:  # overrides of the default recipe
        recipe, overrides = str(DEFAULT_RECIPE), [recipe, *overrides]
    more = [f"model.path={json.dumps(model)}"] if model else []
    more += [f"model.layers={layers}", "model.random_weights=true"] if layers else []
    config = with_absolute_paths(read_recipe(recipe, [*overrides, *more]))
    check_model(config)
    check_files(config)
    if config.sync.mode != "merged" or config.lora.variant != "lora":
        raise ConfigError(
            f"sync.mode is {config.sync.mode} and lora.variant {config.lora.variant}: the library beside which this is "
            "measured brings merged weights of plain LoRA only; leave both out"
        )
    return config


async def bench(config: RunConfig, repeats: int) -> tuple[dict[str, Measured], list[str]]:
    """Start the pools and compare the ways on them."""
    from rl_actors.driver.pools import start_pools

    async with start_pools(config, f"{config.run_path.name}-{int(time.time())}") as pools:
        await pools.rollout.pause()
        await pools.sync.set_up(check_base=True)
        return await compare(config, pools, repeats)


async def compare(config: RunConfig, pools: Pools, repeats: int) -> tuple[dict[str, Measured], list[str]]:
    """Measure every way `repeats` times, in turns, after a warm-up that compares the engines with the trainer.

    Args:
        pools: with a weight sync that is set up. The engines end paused, with the trainer's weights.

    Returns:
        What was measured, by the way's name, and remarks on each sync of `shard_to_shard`.
    """
    from jobs.bench.sync_paths import PATHS
    from placement.bundles import resolve_device

    device = "cuda" if resolve_device(config.placement.device) == "gpu" else "cpu"
    bench = _Bench(config, pools)
    paths = [path(config, pools, device) for path in PATHS]
    for path in paths:
        await path.set_up()
        await bench.warm_up(path)
    for repeat in range(repeats):
        await pools.trainer.perturb_adapters(repeat, NOISE)
        for turn in range(len(paths)):
            await bench.measure(paths[(repeat + turn) % len(paths)])
    await bench.measure_floor(repeats)
    for path in paths:
        await path.close()
    return bench.measured, paths[-1].notes


class _Bench:
    def __init__(self, config: RunConfig, pools: Pools) -> None:
        from jobs.bench.members import Ranks, Workers
        from jobs.bench.memory import Memory

        self._config, self._pools = config, pools
        timeout_s = config.timeouts.sync_s
        self._ranks = Ranks(pools.trainer.actors, Memory, timeout_s)
        self._workers = Workers(pools.rollout.actors, config.rollout.tp, Memory, timeout_s)
        self._version = 0
        self.measured: dict[str, Measured] = defaultdict(lambda: Measured([]))

    async def warm_up(self, path: Any) -> None:
        """Bring a change to the engines, and compare their log-probabilities with the trainer's."""
        await self._pools.trainer.perturb_adapters(1000 + self._version, NOISE)
        await self._timed(path)
        self.measured[path.name] = Measured([], difference=await self._largest_difference())

    async def measure(self, path: Any) -> None:
        for side in (self._ranks, self._workers):
            await side.call("start")
        seconds, nbytes = await self._timed(path)
        one = self.measured[path.name]
        one.seconds.append(seconds)
        one.nbytes = nbytes
        one.peak = max(one.peak, *await self._ranks.call("extra"), *await self._workers.call("extra"))

    async def measure_floor(self, repeats: int) -> None:
        """Copy what shard_to_shard moves, each worker its part."""
        nbytes = self.measured["shard_to_shard"].nbytes
        each = nbytes // len(self._workers)
        floor = self.measured["floor"] = Measured([], each * len(self._workers))
        for _ in range(repeats):
            floor.seconds.append(max(await self._workers.call("copy", [(each,)] * len(self._workers))))

    async def _timed(self, path: Any) -> tuple[float, int]:
        self._version += 1
        await self._pools.rollout.pause()
        started = time.perf_counter()
        nbytes = await path.run(self._version)
        seconds = time.perf_counter() - started
        # shard_to_shard has resumed them already.
        await self._pools.rollout.pause()
        await self._pools.rollout.resume(self._version)
        await self._pools.rollout.pause()
        return seconds, nbytes

    async def _largest_difference(self) -> float:
        """Greatest difference of engines' and trainer's log-probabilities over a few sampled answers."""
        from rl_actors.driver.together import together
        from rl_actors.types import Prompt, TrainBatch

        random = np.random.default_rng(0)
        prompts = [
            Prompt(f"bench-{number}", random.integers(1, 100, PROMPT_TOKENS).astype(np.int32), "")
            for number in range(PROMPTS)
        ]
        await self._pools.rollout.resume()
        answers = await together(self._pools.rollout.generate(prompt, SAMPLES, 0) for prompt in prompts)
        await self._pools.rollout.pause()
        pairs = [(prompt, answer) for prompt, group in zip(prompts, answers, strict=True) for answer in group]
        lengths = np.array([len(answer.token_ids) for _, answer in pairs], dtype=np.int32)
        zeros = np.zeros(int(lengths.sum()), dtype=np.float32)
        batch = TrainBatch(
            tokens=np.concatenate([np.concatenate([prompt.token_ids, answer.token_ids]) for prompt, answer in pairs]),
            prompt_lengths=np.full(len(pairs), PROMPT_TOKENS, dtype=np.int32),
            response_lengths=lengths,
            sampler_logprobs=zeros,
            advantages=zeros,
            loss_weights=zeros,
        )
        sampled = np.concatenate([answer.logprobs for _, answer in pairs])
        return float(np.abs(sampled - await self._pools.trainer.compute_logprobs(batch)).max())


def show(measured: dict[str, Measured], notes: Sequence[str]) -> None:
    """The table for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Weight sync, medians", title_justify="left", box=None, pad_edge=False)
    for column in ("", "seconds", "min - max", "GB/s", "MB moved", "peak extra MB", "x library", "engine - trainer"):
        table.add_column(column, justify="right" if column else "left")
    slowest = measured["library"].row("library").seconds
    for name, one in measured.items():
        row = one.row(name)
        table.add_row(
            name,
            f"{row.seconds:.3f}",
            f"{min(one.seconds):.3f} - {max(one.seconds):.3f}",
            f"{row.gb_per_s:.2f}",
            f"{row.bytes / 1e6:.0f}",
            f"{row.peak_extra_bytes / 1e6:.0f}",
            f"{slowest / row.seconds:.1f}",
            "" if one.difference is None else f"{one.difference:.1g}",
        )
    console = Console(width=120)
    console.print(table)
    for note in notes[-1:]:
        console.print(f"shard_to_shard, last: {note}")


if __name__ == "__main__":
    run(main)
