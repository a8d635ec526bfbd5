"""The bench of a LoRA step runs on CPU too and ends with its rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_rows_are_the_frozen_base_and_one_adapter_for_each_expert(tiny_moe: Path) -> None:
    command = [sys.executable, "-m", "jobs.bench.lora_step", "--model", str(tiny_moe), "--json"]
    sizes = ["--sequences", "4", "--tokens", "32", "--rank", "8", "--repeats", "1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run([*command, *sizes], env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    rows = {row["name"]: row for row in json.loads(result.stdout.splitlines()[-1])["rows"]}
    assert set(rows) == {"frozen_base", "per_expert"}
    assert rows["frozen_base"]["ratio"] == 1.0
    assert rows["per_expert"]["seconds"] > 0
