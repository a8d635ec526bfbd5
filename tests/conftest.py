"""What tests of several folders share: the small model with its data, made once for the session."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.make_tiny_model import make_tiny_model
from jobs.tiny_model.settings import Arch, TinyModelSettings, TrainingSettings

REPOSITORY = Path(__file__).resolve().parent.parent
# What stands for the trainer's ranks goes by its plain name, in rank processes too.
sys.path.insert(0, str(REPOSITORY / "tests" / "trainer"))


@pytest.fixture(scope="session", autouse=True)
def _children_find_the_repository() -> None:
    """Actors and subprocesses started from tests import the project from here."""
    if str(REPOSITORY) not in sys.path:
        sys.path.insert(0, str(REPOSITORY))


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a barely trained Qwen3-MoE with its tokenizer, train.jsonl and eval.jsonl."""
    return _barely_trained("moe", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for a Qwen3."""
    return _barely_trained("dense", tmp_path_factory)


@pytest.fixture(scope="session")
def rank_processes() -> Iterator[Any]:
    """Four processes that stand for the trainer's ranks; each test runs on as many as its layout has."""
    from rank_process import RankProcesses

    ranks = RankProcesses(4)
    yield ranks
    ranks.close()


def _barely_trained(arch: Arch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / f"tiny {arch}"
    training = TrainingSettings(steps=30)
    settings = TinyModelSettings(arch=arch, layers=2, train_prompts=64, eval_prompts=16, training=training)
    make_tiny_model(folder, settings, progress=False)
    return folder
