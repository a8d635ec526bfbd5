"""Checkpoints reach a folder, a file:// URI and a real S3 server, and come back whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow.fs import FileSystem

from rl_actors.config import RunConfig
from rl_actors.driver.checkpoint_storage import CheckpointStorage
from rl_actors.driver.checkpoint_store import CheckpointStore, Retention, Score
from rl_actors.driver.driver import find_checkpoint
from rl_actors.errors import CheckpointError, ConfigError
from tests.driver.live_pools import make_config


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """host:port of a local S3 server."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("ACCESS_KEY_ID", "test"),
            ("SECRET_ACCESS_KEY", "test"),
            ("EC2_METADATA_DISABLED", "true"),
        ):
            patch.setenv(f"AWS_{name}", value)
        host, port = server.get_host_and_port()
        yield f"{host}:{port}"
    server.stop()


@pytest.fixture(params=["folder", "file", "s3"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "a store")
    if request.param == "file":
        return f"file://{tmp_path}/store"
    query = "scheme=http&region=us-east-1&allow_bucket_creation=true"
    return f"s3://{tmp_path.name.replace('_', '-')[:40]}/runs?endpoint_override={request.getfixturevalue('s3')}&{query}"


def save(store: CheckpointStore, step: int, score: float = 0.0) -> Path:
    folder = store.begin(step)
    (folder / "trainer").mkdir()
    (folder / "trainer" / "rank-0.bin").write_bytes(bytes([step]) * 1000)
    (folder / "state.json").write_text("{}")
    return store.commit(step, score=Score(score, "held-out"))


def stored(uri: str, run: str = "run") -> list[str]:
    """Names below the run's folder, as another program sees them."""
    from pyarrow.fs import FileSelector

    files, path = FileSystem.from_uri(uri)
    return sorted(info.base_name for info in files.get_file_info(FileSelector(f"{path}/{run}")))


def spoil(uri: str, name: str) -> None:
    files, path = FileSystem.from_uri(uri)
    with files.open_output_stream(f"{path}/run/{name}") as file:
        file.write(b"other bytes")


def config_for(folder: Path, uri: str, resume: str = "auto") -> RunConfig:
    return make_config(folder, folder / "run", checkpoint={"storage": uri, "resume": resume})


def test_a_new_node_goes_on_from_the_storage(tmp_path: Path, uri: str) -> None:
    first = CheckpointStore(tmp_path / "first", keep_last=2, keep_best=1)
    storage = CheckpointStorage(uri, "run", first.retention)
    config = config_for(tmp_path, uri)
    assert find_checkpoint(config, first, storage) is None
    for step, score in ((1, 0.9), (2, 0.1), (3, 0.2), (4, 0.3)):
        storage.upload(save(first, step, score))
    assert stored(uri) == ["latest", "step-000001", "step-000003", "step-000004"]

    other = CheckpointStore(tmp_path / "other", keep_last=2)
    found = find_checkpoint(config, other, CheckpointStorage(uri, "run", other.retention))
    assert found == other.folder / "step-000004" == other.load_newest()
    assert (found / "trainer" / "rank-0.bin").read_bytes() == bytes([4]) * 1000
    assert json.loads((found / "score.json").read_text())["value"] == 0.3
    assert find_checkpoint(config, other, storage) == found  # it is here now: nothing is fetched again

    empty = CheckpointStore(tmp_path / "empty", keep_last=2)
    assert find_checkpoint(config, empty, CheckpointStorage(uri, "another run", Retention(1))) is None
    storage = CheckpointStorage(uri, "run", empty.retention)
    assert find_checkpoint(config_for(tmp_path, uri, "never"), empty, storage) is None
    assert find_checkpoint(config, empty, storage) is None  # the old run's are there, but no run goes on from them
    storage.upload(save(empty, 2))
    assert stored(uri) == ["latest", "step-000001", "step-000002"]


def test_damage_in_the_storage_is_found_and_an_older_one_serves(
    tmp_path: Path, uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = CheckpointStore(tmp_path / "first", keep_last=9)
    storage = CheckpointStorage(uri, "run", first.retention)
    for step in (1, 2, 3):
        storage.upload(save(first, step))
    spoil(uri, "step-000003/trainer/rank-0.bin")
    spoil(uri, "step-000002/manifest.json")
    other = CheckpointStore(tmp_path / "other", keep_last=9)
    config = config_for(tmp_path, uri)
    assert find_checkpoint(config, other, storage) == other.folder / "step-000001"
    assert "rank-0.bin has 11 bytes, 1000 were written" in caplog.text
    assert [path.name for path in other.folder.glob(".writing-*")] == []

    (first.folder / "step-000003" / "state.json").unlink()  # of two that have something, the newest whole one counts
    assert find_checkpoint(config, first, storage) == first.folder / "step-000002"
    for step in (1, 2):
        (first.folder / f"step-{step:06d}" / "state.json").unlink()
    assert find_checkpoint(config, first, storage) == first.folder / "step-000001"
    spoil(uri, "step-000001/state.json")
    (first.folder / "step-000001" / "state.json").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint is whole"):
        find_checkpoint(config, first, storage)


def test_what_is_damaged_in_the_storage_is_no_best_one(tmp_path: Path, uri: str) -> None:
    store = CheckpointStore(tmp_path / "first", keep_last=1, keep_best=1)
    storage = CheckpointStorage(uri, "run", store.retention)
    for step, score in ((1, 0.9), (2, 0.5)):
        storage.upload(save(store, step, score))
    spoil(uri, "step-000001/trainer/rank-0.bin")
    storage.upload(save(store, 3, 0.1))
    assert stored(uri) == ["latest", "step-000002", "step-000003"]
    spoil(uri, "step-000002/manifest.json")
    storage.upload(save(store, 4, 0.2))
    assert stored(uri) == ["latest", "step-000004"]


@pytest.mark.parametrize("bad", ["foo://bucket/x", "/proc/nothing"])
def test_what_cannot_be_written_is_one_sentence(bad: str) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.storage .* cannot be written") as caught:
        CheckpointStorage(bad, "run", Retention(1))
    assert "\n" not in str(caught.value)


def test_a_bucket_that_is_not_there(s3: str) -> None:
    with pytest.raises(ConfigError, match=r"no-such-bucket.* cannot be written: .*not found"):
        CheckpointStorage(
            f"s3://no-such-bucket/x?endpoint_override={s3}&scheme=http&region=us-east-1", "run", Retention(1)
        )


def test_a_damaged_latest_and_a_strange_folder_stop_nothing(
    tmp_path: Path, uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = CheckpointStore(tmp_path / "first", keep_last=9)
    storage = CheckpointStorage(uri, "run", first.retention)
    storage.upload(save(first, 1))
    FileSystem.from_uri(uri)[0].create_dir(f"{FileSystem.from_uri(uri)[1]}/run/step-old")
    storage.upload(save(first, 2))
    spoil(uri, "latest")
    other = CheckpointStore(tmp_path / "other", keep_last=9)
    found = find_checkpoint(config_for(tmp_path, uri), other, CheckpointStorage(uri, "run", other.retention))
    assert found == other.folder / "step-000002"
    assert "latest is damaged" in caplog.text
