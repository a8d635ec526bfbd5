"""A checkpoint is whole or absent, whatever happened to its files or to the process that wrote it."""

from pathlib import Path

import pytest

from rl_actors.driver.checkpoint_store import MANIFEST, CheckpointStore
from rl_actors.errors import CheckpointError


def save(store: CheckpointStore, step: int) -> Path:
    folder = store.begin(step)
    (folder / "ranks").mkdir()
    (folder / "ranks" / "rank-0.bin").write_bytes(bytes([step]) * 1000)
    (folder / "state.json").write_text("{}")
    return store.commit(step)


def test_newest_is_found_and_only_the_last_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "odd path with spaces", keep_last=2)
    assert store.load_newest() is None
    for step in (5, 10, 100):
        save(store, step)
    assert store.steps() == [10, 100]
    assert store.load_newest() == store.folder / "step-000100"
    assert (store.folder / "latest").read_text() == "step-000100"


def test_an_interrupted_write_is_never_loaded_and_is_overwritten(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 1)
    (store.begin(2) / "state.json").write_text("{")
    assert store.load_newest() == tmp_path / "step-000001"
    save(store, 2)
    assert store.load_newest() == tmp_path / "step-000002"


def truncate(checkpoint: Path) -> None:
    file = checkpoint / "ranks" / "rank-0.bin"
    file.write_bytes(file.read_bytes()[:-1])


def change(checkpoint: Path) -> None:
    file = checkpoint / "ranks" / "rank-0.bin"
    file.write_bytes(b"x" + file.read_bytes()[1:])


def remove(checkpoint: Path) -> None:
    (checkpoint / "state.json").unlink()


def unseal(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink()


@pytest.mark.parametrize("damage", [truncate, change, remove, unseal])
def test_a_damaged_checkpoint_is_named_and_the_one_before_serves(
    tmp_path: Path, damage, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, keep_last=3)
    save(store, 1)
    damage(save(store, 2))
    assert store.load_newest() == tmp_path / "step-000001"
    assert "step-000002" in caplog.text


def test_with_no_whole_checkpoint_left_every_fault_is_told(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=3)
    for step in (1, 2):
        truncate(save(store, step))
    with pytest.raises(CheckpointError, match=r"step-000002.*999 bytes.*step-000001"):
        store.load_newest()
