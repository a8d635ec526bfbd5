"""W&B never blocks or ends a run: no network, a server that never answers, a full queue, a broken service."""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import wandb

from rl_actors.tracking.wandb import WandbWriter, has_key, resolve_mode


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    yield
    # Ends W&B's helper process and forgets the settings that it read from this test's environment.
    wandb.teardown()


@pytest.fixture
def silent_server() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(50)
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def rows(run_dir: Path) -> list[dict[str, object]]:
    """The logged rows of the offline run's file."""
    from wandb.proto import wandb_internal_pb2

    (path,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    found = []
    for data in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.history.item:
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            found.append({key: json.loads(value) for key, value in items.items()})
    return found


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format behind W&B's own 7 bytes (wandb brings no reader any more).

    A block is 32 KiB; a chunk in it is checksum (4 bytes), length (2), type (1: whole, 2-4: first, middle, last part).
    """
    block, position, record = 32768, 7, b""
    while position + 7 <= len(data):
        if block - position % block < 7:
            position += block - position % block
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def test_auto_is_online_only_with_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert resolve_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert resolve_mode("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert resolve_mode("auto") == "offline"
    assert resolve_mode("online") == "online"


def test_netrc_key_counts_for_its_server_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert has_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://api.forge.coreweave.com")
    assert has_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not has_key()


def test_off_writes_nothing(tmp_path: Path) -> None:
    writer = WandbWriter("off", "p", "n", tmp_path, {})
    writer.log({"step": 1})
    writer.finish()
    assert not (tmp_path / "wandb").exists()


def test_without_a_key_the_run_is_whole_on_disk(tmp_path: Path) -> None:
    started = time.monotonic()
    writer = WandbWriter("auto", "p", "n", tmp_path, {"seed": 0, "lr": float("nan")})
    assert time.monotonic() - started < 0.5, "making the writer must not wait for W&B"
    for number in range(1, 6):
        writer.log({"step": number, "reward_mean": number / 10, "kl": float("nan")})
    writer.finish()
    assert writer.dropped == 0
    logged = rows(tmp_path)
    assert [(row["step"], row["reward_mean"]) for row in logged] == [(n, n / 10) for n in range(1, 6)]
    assert "kl" not in logged[0]
    helpers = [child for child in psutil.Process().children(recursive=True) if child.name().startswith("wandb")]
    assert not helpers, "as long as W&B's helper runs, the run may not be whole on disk"


def test_full_queue_drops_and_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = WandbWriter("offline", "p", "n", tmp_path, {}, queue_size=3)
    started = time.monotonic()
    for number in range(100):
        writer.log({"step": number})
    assert time.monotonic() - started < 0.5
    writer.finish()
    assert writer.dropped > 0 and len(rows(tmp_path)) == 100 - writer.dropped
    assert any("missed" in record.message for record in caplog.records)


def test_unreachable_server_falls_back_to_offline_with_one_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, silent_server: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", silent_server)
    with caplog.at_level(logging.WARNING):
        writer = WandbWriter("auto", "p", "n", tmp_path, {}, init_timeout_s=1)
        writer.log({"step": 1})
        writer.finish()
    assert writer.mode == "offline" and [row["step"] for row in rows(tmp_path)] == [1]
    messages = [record.message for record in caplog.records if record.name.startswith("rl_actors")]
    assert len(messages) == 1 and "cannot be reached" in messages[0]


HANGS = """
import sys, time
from pathlib import Path
from rl_actors.tracking.wandb import WandbWriter
init_timeout_s, finish_timeout_s = map(float, sys.argv[2:])
writer = WandbWriter(
    "online", "p", "n", Path(sys.argv[1]), {}, init_timeout_s=init_timeout_s, finish_timeout_s=finish_timeout_s
)
time.sleep(2)
started = time.monotonic()
writer.finish()
print(time.monotonic() - started, time.time(), flush=True)
"""


@pytest.mark.parametrize(
    ("init_timeout_s", "finish_timeout_s", "message"),
    [(600, 2, "did not finish"), (1, 40, "kept offline")],
    ids=["left behind", "fallen back"],
)
def test_silent_server_holds_neither_finish_nor_the_exit_of_the_process(
    tmp_path: Path, silent_server: str, init_timeout_s: float, finish_timeout_s: float, message: str
) -> None:
    environment = os.environ | {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": silent_server}
    child = subprocess.run(
        [sys.executable, "-c", HANGS, str(tmp_path), str(init_timeout_s), str(finish_timeout_s)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
    )
    finish_s, left_at = map(float, child.stdout.split())
    assert child.returncode == 0 and finish_s < finish_timeout_s + 8
    # W&B would wait here: 10 to 20 s for its telemetry, for ever for a run that is still starting.
    assert time.time() - left_at < 8
    assert message in child.stderr and "Traceback" not in child.stderr


def test_resumed_run_keeps_its_id(tmp_path: Path) -> None:
    ids = []
    for resume in (False, True, False):
        (tmp_path / "wandb").mkdir(exist_ok=True)
        writer = WandbWriter("offline", "p", "n", tmp_path, {}, resume=resume)
        writer.finish()
        ids.append((tmp_path / "wandb" / "run_id").read_text())
    assert ids[0] == ids[1] != ids[2]
