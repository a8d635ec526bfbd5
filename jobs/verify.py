"""Self-check before a long run: `python -m jobs.verify RECIPE [section.key=value ...]`, on its own model and cluster.

Prints a table of checks; exit code 1 when one fails. With --json the last line is one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import math

from jobs.cli import connect, disconnect, positive, read_recipe, recipe_parser, run
from jobs.train import check_cluster
from rl_actors.driver.self_check import Check
from rl_actors.preflight import Prepared, prepare

EXPORT_LIMIT = 2_000_000_000
"""Parameters up to which the exported model is also loaded with transformers."""


def main() -> int:
    parser = recipe_parser(__doc__ or "")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--prompts", type=positive, default=8, help="prompts to sample and compare (default 8)")
    arguments = parser.parse_intermixed_args()
    from rl_actors.tracking.console import configure_logging

    configure_logging()
    prepared = prepare(read_recipe(arguments.config, arguments.overrides))
    connect()
    check_cluster(prepared.config)
    checks = asyncio.run(verify(prepared, arguments.prompts))
    # Actors' last log lines come before the result, not behind it.
    disconnect()
    show(checks)
    if arguments.json:
        print(json.dumps({"checks": [as_dict(check) for check in checks]}))
    return 0 if all(check.ok for check in checks) else 1


async def verify(prepared: Prepared, prompts: int) -> list[Check]:
    """Start the pools of the run and check them."""
    from rl_actors.driver.pools import start_pools
    from rl_actors.driver.self_check import Tolerances, self_check

    # Fresh adapters, which the base model must be equal to; `lora.init_from` changes nothing of what is checked.
    lora = prepared.config.lora.model_copy(update={"init_from": None})
    config, shape = prepared.config.model_copy(update={"lora": lora}), prepared.shape
    tolerances = Tolerances.of(config.model.dtype, shape.is_moe)
    async with start_pools(config, f"{config.run_path.name}-verify") as pools:
        with_export = shape.parameters <= EXPORT_LIMIT and not config.model.random_weights
        return await self_check(config, pools, prepared.train_prompts[:prompts], tolerances, with_export)


def show(checks: list[Check]) -> None:
    """The table for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table("check", "value", "allowed", "", title="Self-check", title_justify="left", box=None, pad_edge=False)
    for check in checks:
        allowed = f"{'>' if check.floor else '<='} {check.tolerance:g}"
        verdict = "[green]ok[/green]" if check.ok else "[red]FAILED[/red]"
        table.add_row(check.name, f"{check.value:.3g}", allowed, verdict)
    Console(width=120).print(table)


def as_dict(check: Check) -> dict[str, str | float | bool | None]:
    """JSON has no infinity: a check without a bound has the tolerance null."""
    tolerance = check.tolerance if math.isfinite(check.tolerance) else None
    return {"name": check.name, "value": check.value, "tolerance": tolerance, "ok": check.ok}


if __name__ == "__main__":
    run(main)
