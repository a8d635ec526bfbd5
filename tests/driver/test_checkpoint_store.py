"""A checkpoint is whole or absent, whatever happened to its files or to the process that wrote it."""

from pathlib import Path

import pytest

from rl_actors.digests import digest_of
from rl_actors.driver.checkpoint_store import MANIFEST, CheckpointStore, Score, verify_or_offer
from rl_actors.errors import CheckpointError


def save(store: CheckpointStore, step: int, score: float | None = None, kind: str = "held-out") -> Path:
    folder = store.begin(step)
    (folder / "ranks").mkdir()
    (folder / "ranks" / "rank-0.bin").write_bytes(bytes([step]) * 1000)
    (folder / "state.json").write_text("{}")
    return store.commit(step, score=None if score is None else Score(score, kind))


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


def rename_a_key(checkpoint: Path) -> None:
    manifest = checkpoint / MANIFEST
    manifest.write_text(manifest.read_text().replace('"bytes"', '"bxtes"', 1))


def nest(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).write_text('{"state.json": null}')


def name_what_no_file_can_be_called(checkpoint: Path) -> None:
    manifest = checkpoint / MANIFEST
    manifest.write_text(manifest.read_text().replace("state.json", "x" * 300))


def nest_deeply(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).write_text("[" * 100_000)


@pytest.mark.parametrize(
    "damage",
    [truncate, change, remove, unseal, rename_a_key, nest, name_what_no_file_can_be_called, nest_deeply],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_serves(
    tmp_path: Path, damage, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, keep_last=3)
    save(store, 1)
    damage(save(store, 2))
    assert store.load_newest() == tmp_path / "step-000001"
    assert "step-000002" in caplog.text
    assert f"newest whole checkpoint is {tmp_path / 'step-000001'}" in caplog.text
    assert "steps after 1 are trained again" in caplog.text


def test_with_no_whole_checkpoint_left_every_fault_is_told(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=3)
    for step in (1, 2):
        truncate(save(store, step))
    with pytest.raises(CheckpointError, match=r"step-000002.*999 bytes.*step-000001"):
        store.load_newest()


def test_what_goes_on_from_an_older_checkpoint_replaces_the_damaged_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    for step in (1, 2, 3):
        truncate(save(store, step))
    save(store, 2)
    assert store.steps() == [2]  # 1 went when 2 came, and 3 belongs to what was left behind
    assert store.load_newest() == tmp_path / "step-000002"
    assert (tmp_path / "latest").read_text() == "step-000002"


def test_latest_does_not_move_when_the_disk_holds_other_bytes(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 1)
    folder = store.begin(2)
    (folder / "x").write_bytes(b"as in memory")
    written = {"x": digest_of(folder / "x")}
    (folder / "x").write_bytes(b"as on disk!!")
    with pytest.raises(CheckpointError, match="step-000002: x was changed"):
        store.commit(2, written)
    (folder / "x").write_bytes(b"as in memory")
    with pytest.raises(CheckpointError, match="lacks y"):
        store.commit(2, {**written, "y": written["x"]})
    assert (store.steps(), (tmp_path / "latest").read_text()) == ([1], "step-000001")
    assert store.commit(2, written) == tmp_path / "step-000002"


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "stay"),
    [(1, 1, [1, 5]), (1, 2, [1, 4, 5]), (2, 1, [1, 4, 5]), (1, 0, [5]), (1, 9, [1, 3, 4, 5])],
)
def test_the_best_and_the_newest_stay(tmp_path: Path, keep_last: int, keep_best: int, stay: list[int]) -> None:
    store = CheckpointStore(tmp_path, keep_last, keep_best)
    for step, score in ((1, 0.9), (2, None), (3, 0.1), (4, 0.5), (5, 0.2)):
        save(store, step, score)
    assert store.steps() == stay
    assert store.load_newest() == tmp_path / "step-000005"


@pytest.mark.parametrize("damage", [truncate, change, remove, unseal])
def test_a_damaged_checkpoint_is_neither_a_best_nor_a_last_one(tmp_path: Path, damage) -> None:
    store = CheckpointStore(tmp_path, keep_last=2, keep_best=1)
    for step, score in ((1, 0.5), (2, 0.9), (3, 0.1), (4, 0.2)):
        save(store, step, score)
    assert store.steps() == [2, 3, 4]
    damage(tmp_path / "step-000002")
    damage(tmp_path / "step-000004")
    save(store, 5, 0.15)
    assert store.steps() == [3, 4, 5]  # 3 is the whole one before 5; 2 is no best any more, and 4 is behind 3
    save(store, 6, 0.05)
    assert store.steps() == [5, 6]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        '{"value": "high", "kind": "held-out"}',
        '{"value": true, "kind": "held-out"}',
        '{"value": null, "kind": "held-out"}',
        '{"value": 1, "kind": 5}',
        '{"value": 1' + "0" * 400 + ', "kind": "held-out"}',
        '{"value": 1' + "0" * 5000 + ', "kind": "held-out"}',
        "\ud800",
    ],
)
def test_what_is_no_score_counts_as_none(content: str) -> None:
    assert Score.parse(content.encode("utf-8", "surrogatepass")) is None
    assert Score.parse('{"value": 1, "kind": "held-out"}') == Score(1.0, "held-out")


def test_only_scores_of_one_kind_are_compared(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=1)
    for step, score, kind in ((1, 9.0, "mean reward"), (2, 0.5, "held-out"), (3, float("nan"), "held-out")):
        save(store, step, score, kind)
    assert store.steps() == [2, 3]


def test_a_damaged_checkpoint_that_was_asked_for_offers_the_one_before(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=9)
    for step in (1, 2, 3, 4):
        save(store, step)
    truncate(tmp_path / "step-000003")
    remove(tmp_path / "step-000004")
    verify_or_offer(tmp_path / "step-000002")
    with pytest.raises(CheckpointError, match=r"step-000004 lacks state.json; the newest whole .* is .*step-000002$"):
        verify_or_offer(tmp_path / "step-000004")
    unseal(tmp_path / "step-000001")
    with pytest.raises(CheckpointError, match=r"manifest.json; there is no whole one before it$"):
        verify_or_offer(tmp_path / "step-000001")
