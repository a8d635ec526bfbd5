"""Do engines give back and take again what they say, for many cycles? `python -m jobs.bench.sleep_wake RECIPE`

Colocated trainer and engines of a recipe (rollout.sleep says what is given back) go through cycles of the training
loop without training: sleep, wake the weights, sync, resume, sample a prompt. Bytes are the device's own count of free
memory, of all processes together. Exit code 1 when memory asleep is less than promised, or shrinks from cycle to cycle.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from jobs.cli import connect, disconnect, positive, read_recipe, recipe_parser, run
from jobs.train import check_cluster
from rl_actors.errors import ConfigError, RLActorsError
from rl_actors.preflight import Prepared, prepare

if TYPE_CHECKING:
    from rl_actors.driver.pools import Pools

MIB, GIB = 2**20, 2**30
WARM_UP = 2
"""Cycles in which buffers and workspaces are made for the first time; growth is counted from the last of them."""
SLACK = 128 * MIB
"""What the allocators of several processes may round."""


@dataclass(frozen=True)
class Cycle:
    """Free bytes of the fullest GPU while awake, asleep, and awake again; seconds of each part."""

    awake: int
    asleep: int
    again: int
    sleep_s: float
    wake_s: float
    sync_s: float


def main() -> int:
    parser = recipe_parser(__doc__ or "")
    parser.add_argument("--cycles", type=positive, default=20)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    arguments = parser.parse_intermixed_args()
    from rl_actors.tracking.console import configure_logging

    configure_logging()
    config = read_recipe(arguments.config, arguments.overrides)
    if config.rollout.sleep == "never":
        raise ConfigError("rollout.sleep is never, so there is nothing to measure: set it to kv or weights")
    if arguments.cycles <= WARM_UP:
        raise ConfigError(f"--cycles {arguments.cycles} leaves nothing to compare: use more than {WARM_UP}")
    prepared = prepare(config)
    connect()
    check_cluster(prepared.config)
    cycles = asyncio.run(measure(prepared, arguments.cycles))
    disconnect()
    result = summarize(cycles, promised_bytes(prepared))
    show(cycles, result)
    if arguments.json:
        print(json.dumps(result | {"cycles": [asdict(cycle) for cycle in cycles]}))
    return 0 if result["ok"] else 1


def promised_bytes(prepared: Prepared) -> int:
    """What one engine worker gives back at least: its KV cache where its size is fixed, and its weights."""
    rollout, itemsize = prepared.config.rollout, 2 if prepared.config.model.dtype == "bfloat16" else 4
    weights = prepared.shape.parameters * itemsize // rollout.tp if rollout.sleep == "weights" else 0
    return int((rollout.kv_cache_gib or 0) * GIB) + weights


def summarize(cycles: list[Cycle], promised: int) -> dict[str, float | bool]:
    """Bytes given back (least of all cycles) and growth of used memory since the warm-up, asleep and awake."""
    steady = cycles[WARM_UP - 1 :]
    freed = min(cycle.asleep - cycle.awake for cycle in cycles)
    growth_asleep = steady[0].asleep - min(cycle.asleep for cycle in steady[1:])
    growth_awake = steady[0].again - min(cycle.again for cycle in steady[1:])
    return {
        "ok": freed >= promised - SLACK and max(growth_asleep, growth_awake) <= SLACK,
        "freed_bytes": freed,
        "promised_bytes": promised,
        "growth_asleep_bytes": growth_asleep,
        "growth_awake_bytes": growth_awake,
        "sleep_s": float(np.median([cycle.sleep_s for cycle in steady])),
        "wake_s": float(np.median([cycle.wake_s for cycle in steady])),
        "sync_s": float(np.median([cycle.sync_s for cycle in steady])),
    }


async def measure(prepared: Prepared, count: int) -> list[Cycle]:
    from rl_actors.driver.pools import start_pools

    config = prepared.config
    async with start_pools(config, f"{config.run_path.name}-sleep") as pools:
        await pools.rollout.pause()
        await pools.sync.set_up()
        await pools.rollout.resume(0)
        return [await _cycle(prepared, pools, version) for version in range(1, count + 1)]


async def _cycle(prepared: Prepared, pools: Pools, version: int) -> Cycle:
    rollout, trainer = pools.rollout, pools.trainer
    awake = await _free(pools)
    times = [time.perf_counter()]
    await rollout.sleep()
    times.append(time.perf_counter())
    asleep = await _free(pools)
    times.append(time.perf_counter())
    await trainer.release_memory()
    await rollout.wake_weights()
    times.append(time.perf_counter())
    await pools.sync.run(version)
    times.append(time.perf_counter())
    prompt = prepared.train_prompts[version % len(prepared.train_prompts)]
    answers = await rollout.generate(prompt, 2, version)
    if not all(np.isfinite(answer.logprobs).all() for answer in answers):
        raise RLActorsError(f"after cycle {version} the engine's log-probabilities are not finite")
    sleep_s, _, wake_s, sync_s = np.diff(times).tolist()
    return Cycle(awake, asleep, await _free(pools), sleep_s, wake_s, sync_s)


async def _free(pools: Pools) -> int:
    from rl_actors.rollout.sleep import free_bytes

    answers = await pools.rollout.actors.acall("collective_rpc", free_bytes, timeout_s=60, control=True)
    return min(value for engine in answers for value in engine)


def show(cycles: list[Cycle], result: dict[str, float | bool]) -> None:
    """The table for people."""
    from rich.console import Console
    from rich.table import Table

    columns = ("cycle", "free awake", "asleep", "awake again", "sleep s", "wake s", "sync s")
    table = Table(*columns, title="Sleep and wake (GiB)", title_justify="left", box=None, pad_edge=False)
    for number, cycle in enumerate(cycles, start=1):
        sizes = (f"{size / GIB:.2f}" for size in (cycle.awake, cycle.asleep, cycle.again))
        table.add_row(str(number), *sizes, *(f"{s:.3f}" for s in (cycle.sleep_s, cycle.wake_s, cycle.sync_s)))
    console = Console(width=120)
    console.print(table)
    console.print(
        f"given back {result['freed_bytes'] / GIB:.2f} GiB, promised {result['promised_bytes'] / GIB:.2f}; growth "
        f"{result['growth_asleep_bytes'] / MIB:.0f} MiB asleep, {result['growth_awake_bytes'] / MIB:.0f} MiB awake: "
        f"{'ok' if result['ok'] else 'FAILED'}"
    )


if __name__ == "__main__":
    run(main)
