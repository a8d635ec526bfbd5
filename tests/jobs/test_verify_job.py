"""`jobs.verify` as a user runs it: every check on four ranks (MoE, merged sync), on two stages (dense, adapter)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

KINDS = {"moe": ["experts.linear_fc1", "experts.linear_fc2"], "dense": ["linear_fc1", "linear_fc2"]}


@pytest.mark.parametrize(
    ("arch", "layout"),
    [
        ("moe", ["trainer.tp=2", "trainer.pp=2", "trainer.ep=2"]),
        ("dense", ["trainer.pp=2", "trainer.recompute=full", "sync.mode=adapter"]),
    ],
)
def test_every_check_passes_in_float32(
    arch: str, layout: list[str], request: pytest.FixtureRequest, tmp_path: Path, run_job: Callable
) -> None:
    model: Path = request.getfixturevalue(f"tiny_{arch}")
    data = f"data={{train: {json.dumps(str(model / 'train.jsonl'))}, id_column: id}}"
    run_dir = f"run_dir={json.dumps(str(tmp_path / 'run'))}"
    recipe = ["jobs/configs/quickstart.yaml", f"model.path={json.dumps(str(model))}", data, run_dir]
    done = run_job("verify", *recipe, *layout, "--json")
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]

    checks = {check["name"]: check for check in json.loads(done.stdout.strip().splitlines()[-1])["checks"]}
    assert all(check["ok"] for check in checks.values())
    assert checks["step 0: adapted - base, max"]["value"] == 0
    assert checks["nonzero adapters: adapted - base, max"]["value"] > 0.01
    for comparison in ("after sync: engine - trainer, max", "exported model - trainer, max"):
        assert checks[comparison]["tolerance"] == 1e-4 and checks[comparison]["value"] <= 1e-4
    gradients = {name.removeprefix("gradient of ") for name in checks if name.startswith("gradient of ")}
    assert gradients == {"linear_qkv", "linear_proj", *KINDS[arch]}
