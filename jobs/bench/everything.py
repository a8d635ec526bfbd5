"""The measurements of jobs/bench/RESULTS.md on this machine, one after the other: `python -m jobs.bench.everything`.

Each is a job of its own with a time limit; a failure or a late end stops only that one. DIR, a new folder, gets
NAME.log of each, and NAME.json where the job ends with a line of JSON; a table comes at the end. --list shows the
commands, --only takes some of them.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.cli import run
from rl_actors.errors import ConfigError
from rl_actors.json_object import json_object
from rl_actors.paths import writable_folder

RANDOM = "jobs/configs/qwen3_30b_a3b_random.yaml"
TINY = "jobs/configs/quickstart.yaml"
ON_GPU = ("placement.device=gpu", "placement.colocate=true", "rollout.kv_cache_gib=4")
FAST_START = ("rollout.enforce_eager=true", "rollout.kv_cache_gib=1")
DENSE = ("model.path=tiny:dense", "data.train=tiny:dense/train.jsonl", "data.eval=tiny:dense/eval.jsonl")
MODELS: dict[str, tuple[str, ...]] = {"moe": (), "dense": DENSE}


@dataclass(frozen=True)
class Measurement:
    """`command` follows `python -m`; it is stopped after `limit_s`."""

    name: str
    command: tuple[str, ...]
    limit_s: float = 600
    environment: dict[str, str] = field(default_factory=dict)


def measurements(gpu: bool, folder: Path) -> list[Measurement]:
    """All of them, the shortest ways to a broken part first.

    Args:
        folder: of the results; runs write theirs below it.
    """
    common = ON_GPU if gpu else ()
    usual = "bfloat16" if gpu else "float32"
    found = []
    for arch, model in MODELS.items():
        for mode, dtype in (("merged", "float32"), ("merged", "bfloat16"), ("adapter", "bfloat16")):
            settings = (*common, *model, f"sync.mode={mode}", f"model.dtype={dtype}")
            found.append(Measurement(f"verify-{arch}-{mode}-{dtype}", ("jobs.verify", TINY, *settings, "--json")))
        for variant in ("canonical_lora", "dora"):
            settings = (*common, *model, f"lora.variant={variant}", f"model.dtype={usual}")
            found.append(Measurement(f"verify-{arch}-{variant}", ("jobs.verify", TINY, *settings, "--json")))
        for start in ("cold", "warm"):
            run_dir = folder / "runs" / f"quickstart-{arch}-{start}"
            settings = (*common, *model, f"model.dtype={usual}", "pipeline.steps=40", "tracking.wandb=off")
            command = ("jobs.train", TINY, *settings, f"run_dir={json.dumps(str(run_dir))}")
            found.append(Measurement(f"quickstart-{arch}-{start}", command, 600, _caches(folder / "caches" / arch)))
    found.append(Measurement("logprobs", ("jobs.bench.logprobs", "--json")))
    found.append(Measurement("sync-modes", ("jobs.bench.sync_modes", TINY, *common, "--json"), 600))
    if not gpu:
        return [*found, Measurement("weight-sync", ("jobs.bench.weight_sync", "--json"))]
    found.append(Measurement("lora-step", ("jobs.bench.lora_step", "--json")))
    for part in ("kv", "weights"):
        command = ("jobs.bench.sleep_wake", RANDOM, "model.layers=8", *FAST_START, f"rollout.sleep={part}", "--json")
        found.append(Measurement(f"sleep-wake-{part}", command, 600))
    sync = ("jobs.bench.weight_sync", RANDOM, "rollout.sleep=never", *FAST_START, "--repeats", "3", "--json")
    modes = ("jobs.bench.sync_modes", RANDOM, "rollout.sleep=never", "--no-rounding", "--json")
    whole = ("jobs.train", RANDOM, f"run_dir={json.dumps(str(folder / 'runs' / 'whole'))}", "tracking.wandb=off")
    return [
        *found,
        Measurement("weight-sync", sync, 600),
        Measurement("sync-modes-whole", modes, 900),
        Measurement("whole-run", whole, 600),
    ]


def _caches(folder: Path) -> dict[str, str]:
    """Compiled kernels of the cold start, for the warm one."""
    from rl_actors.actor_environment import CACHES

    return {name: str(folder / leaf) for name, leaf in CACHES.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "gpu"), required=True)
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: runs/measurements-TIME")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these, or those that start with it")
    parser.add_argument("--list", action="store_true", help="show the commands and do nothing")
    arguments = parser.parse_args()
    folder = (arguments.out or Path(f"runs/measurements-{time.strftime('%Y%m%d-%H%M%S')}")).resolve()
    chosen = choose(measurements(arguments.device == "gpu", folder), arguments.only)
    if arguments.list:
        for one in chosen:
            settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in one.environment.items())
            print(f"{one.name}, at most {one.limit_s:g} s: {settings} python -m {shlex.join(one.command)}")
        return 0
    make_folder(folder)
    # However this ends, the job that is under way ends with it.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    results = {one.name: measure(one, folder) for one in chosen}
    show(results)
    return 0 if all(outcome == "done" for outcome, _ in results.values()) else 1


def make_folder(folder: Path) -> None:
    """Results of two calls would mix, and a run that is there already would go on instead of starting.

    Raises:
        ConfigError: it cannot be made, or something lies in it.
    """
    try:
        writable_folder(folder, "--out").mkdir(parents=True, exist_ok=True)
        filled = any(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"--out {folder} cannot be made: {error.strerror}") from error
    if filled:
        raise ConfigError(f"--out {folder} is not empty: give a new folder")


def choose(found: list[Measurement], names: Sequence[str] | None) -> list[Measurement]:
    """Those whose names start with one of `names`. Raises ConfigError for a name that chooses nothing."""
    for name in names or ():
        if not name or not any(one.name.startswith(name) for one in found):
            raise ConfigError(f"--only {name!r} is no measurement: use {', '.join(one.name for one in found)}")
    return [one for one in found if not names or one.name.startswith(tuple(names))]


def measure(one: Measurement, folder: Path) -> tuple[str, float]:
    """How it ended, and its seconds."""
    print(f"{one.name}: python -m {shlex.join(one.command)}", flush=True)
    started = time.monotonic()
    log = folder / f"{one.name}.log"
    with log.open("w", encoding="utf-8") as output:
        # A group of its own: a stopped job's Ray cluster goes with it.
        process = subprocess.Popen(
            [sys.executable, "-m", *one.command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | one.environment,
            start_new_session=True,
        )
        try:
            code = process.wait(one.limit_s)
            outcome = "done" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            outcome = f"stopped after {one.limit_s:g} s"
        finally:
            _stop(process)
    if outcome == "done" and (result := _last_line(log)) is not None:
        (folder / f"{one.name}.json").write_text(json.dumps(result), encoding="utf-8")
    return outcome, time.monotonic() - started


def _stop(process: subprocess.Popen[Any]) -> None:
    """End what a job left running; Ray's processes leave the group, so they are found as children first."""
    import psutil

    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    process.kill()
    process.wait()
    for child in family:
        child.kill()
    psutil.wait_procs(family, timeout=10)


def _last_line(log: Path) -> Any:
    """The object in the last line, if there is one."""
    try:
        return json_object(log.read_text(encoding="utf-8", errors="replace").rstrip().rpartition("\n")[2])
    except ValueError:
        return None


def show(results: dict[str, tuple[str, float]]) -> None:
    """The table for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table("measurement", "ended", "seconds", box=None, pad_edge=False)
    for name, (outcome, seconds) in results.items():
        table.add_row(name, outcome, f"{seconds:.0f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    run(main)
