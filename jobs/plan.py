"""What a run would put where, and whether it fits: `python -m jobs.plan RECIPE [section.key=value ...]`.

Nothing is started: it needs the model's config.json, and neither a cluster nor a GPU.
"""

from __future__ import annotations

from jobs.cli import gib, read_recipe, recipe_parser, run
from placement.memory import estimate_memory
from placement.plan import Device
from rl_actors.driver.plan_run import plan_run
from rl_actors.preflight import check_model, with_absolute_paths


def main() -> int:
    parser = recipe_parser(__doc__ or "")
    parser.add_argument("--gpu-gib", type=gib, default=80.0, help="memory of one GPU (default 80: H100)")
    arguments = parser.parse_intermixed_args()
    config = with_absolute_paths(read_recipe(arguments.config, arguments.overrides))
    shape, _, _ = check_model(config)
    device: Device = "cpu" if config.placement.device == "cpu" else "gpu"
    print(f"{config.model.path}: {shape.parameters / 1e9:.2f}B parameters\n")
    print(plan_run(config, device).describe())
    if device == "cpu":
        return 0
    estimate = estimate_memory(config, shape, arguments.gpu_gib)
    print(f"\n{estimate.table()}\n\nverdict: {estimate.verdict}")
    return 0 if estimate.ok else 1


if __name__ == "__main__":
    run(main)
