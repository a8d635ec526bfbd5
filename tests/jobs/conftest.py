"""Running a job as a user does: its own process, its own exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def run_job() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_job("train", "recipe.yaml", ...)`: runs `python -m jobs.train ...` to its end."""

    def run(job: str, *arguments: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", f"jobs.{job}", *arguments]
        environment = {**os.environ, "RAY_ADDRESS": "local"}
        return subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    return run
