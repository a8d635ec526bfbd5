"""Weights & Biases beside the run, never in its way.

Invariant: no call of `WandbWriter` waits for W&B, except `finish`, which waits a bounded time. A thread owns all of
W&B; records reach it through a bounded queue, and what does not fit is dropped and counted. Whatever W&B raises ends
as one log message.
"""

from __future__ import annotations

import contextlib
import logging
import netrc
import os
import queue
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import psutil

from rl_actors.tracking.records import plain

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

logger = logging.getLogger(__name__)

# Both names of W&B's own cloud; a key saved for one serves the other (wandb 0.31.0).
CLOUD_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")

Mode = Literal["online", "offline", "off"]


class WandbWriter:
    """One W&B run, kept under RUN_DIR/wandb.

    Args:
        mode: of `TrackingConfig.wandb`; "auto" is online if a key is at hand.
        run_dir: a resumed run goes on under the W&B id found here.
        config: shown as the run's configuration.
        resume: go on with the W&B run of an earlier attempt.
        init_timeout_s: after that an online run becomes an offline one.
        finish_timeout_s: longest wait of `finish` for uploads.
        queue_size: records that may wait for W&B.
    """

    def __init__(
        self,
        mode: Literal["auto", "online", "offline", "off"],
        project: str,
        name: str,
        run_dir: Path,
        config: Mapping[str, Any],
        *,
        resume: bool = False,
        init_timeout_s: float = 30.0,
        finish_timeout_s: float = 60.0,
        queue_size: int = 1000,
    ) -> None:
        self.mode: Mode = resolve_mode(mode)
        self.dropped = 0
        self._project, self._name, self._config = project, name, plain(config)
        self._dir = run_dir / "wandb"
        self._init_timeout_s, self._finish_timeout_s = init_timeout_s, finish_timeout_s
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue(queue_size)
        self._closing = threading.Event()
        self._left = threading.Event()
        self._exit_code = 0
        self._thread: threading.Thread | None = None
        if self.mode != "off":
            self._dir.mkdir(parents=True, exist_ok=True)
            self._id = _run_id(self._dir, resume)
            self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
            self._thread.start()

    def log(self, values: Mapping[str, Any]) -> None:
        """Hand over one row of numbers; it should hold "step". Never waits."""
        if self.mode == "off":
            return
        try:
            self._queue.put_nowait(dict(values))
        except queue.Full:
            self.dropped += 1

    def finish(self, exit_code: int = 0) -> None:
        """Send what is left and close the run, within `finish_timeout_s`; then let W&B's process go."""
        if self._thread is None:
            return
        self._exit_code = exit_code
        self._closing.set()
        self._thread.join(self._finish_timeout_s)
        if self._thread.is_alive():
            logger.warning(
                "W&B did not finish within %.0f s and was left; its files are in %s", self._finish_timeout_s, self._dir
            )
            self._left.set()
            _kill_service()
        if self.dropped:
            logger.warning("W&B missed %d records; metrics.jsonl has them all", self.dropped)
        self._thread = None

    def _work(self) -> None:
        # W&B is a guest: it must never end a training run, whatever it raises.
        try:
            # W&B's usage telemetry blocks the process's exit for 20 s when its server is unreachable (wandb 0.31.0).
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
            import wandb

            run = self._init()
            while not (self._closing.is_set() and self._queue.empty()):
                try:
                    values = self._queue.get(timeout=0.2)
                except queue.Empty:
                    continue
                run.log({key: value for key, value in plain(values).items() if value is not None})
            run.finish(self._exit_code)
            # Only the end of W&B's helper process says that an offline run is whole on disk (wandb 0.31.0).
            wandb.teardown(self._exit_code)
        except Exception as error:  # noqa: BLE001
            if not self._closing.is_set():
                logger.warning("W&B stopped (%s); the run goes on without it", _sentence(error))

    def _init(self) -> Run:
        import wandb

        if self.mode == "online":
            try:
                run = self._open("online")
                logger.info("W&B: %s", run.url)
                return run
            except Exception as error:
                if self._left.is_set():
                    raise
                logger.warning("W&B cannot be reached (%s); this run is kept offline", _sentence(error))
                # Frees the run's id, which the failed attempt holds.
                wandb.teardown(exit_code=1)
                self.mode = "offline"
        run = self._open("offline")
        logger.info("W&B is offline: `wandb sync %s` uploads the run", Path(run.dir).parent)
        return run

    def _open(self, mode: Literal["online", "offline"]) -> Run:
        import wandb

        run = wandb.init(
            mode=mode,
            project=self._project,
            name=self._name,
            id=self._id,
            resume="allow" if mode == "online" else None,
            dir=self._dir.parent,
            config=self._config,
            settings=wandb.Settings(
                console="off",
                silent=True,
                init_timeout=self._init_timeout_s,
                login_timeout=self._init_timeout_s,
                finish_timeout=self._finish_timeout_s,
            ),
        )
        # Our own step axis: a resumed run repeats steps, which W&B's internal counter would refuse.
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        return run


def resolve_mode(mode: Literal["auto", "online", "offline", "off"]) -> Mode:
    """What "auto" means here: WANDB_MODE if set, else online if a key is at hand, else offline."""
    if mode != "auto":
        return mode
    asked = os.environ.get("WANDB_MODE", "")
    modes: dict[str, Mode] = {"online": "online", "offline": "offline", "dryrun": "offline", "disabled": "off"}
    return modes.get(asked) or ("online" if has_key() else "offline")


def has_key() -> bool:
    """Whether WANDB_API_KEY, an identity token file or a netrc entry for the W&B server is at hand."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "")).netloc or CLOUD_HOSTS[0]
    hosts = CLOUD_HOSTS if host in CLOUD_HOSTS else (host,)
    candidates = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for candidate in candidates:
        try:
            entries = netrc.netrc(Path(candidate).expanduser())
        except (OSError, netrc.NetrcParseError):
            continue
        if any(entry[2] for entry in map(entries.authenticators, hosts) if entry):
            return True
    return False


def _run_id(wandb_dir: Path, resume: bool) -> str:
    path = wandb_dir / "run_id"
    if resume and path.exists():
        return path.read_text().strip()
    run_id = secrets.token_hex(4)
    path.write_text(run_id + "\n")
    return run_id


def _kill_service() -> None:
    """End W&B's helper process, which a hanging upload would keep, and this process with it at exit."""
    children = [child for child in psutil.Process().children() if child.name().startswith("wandb-core")]
    for child in children:
        child.kill()
    psutil.wait_procs(children, timeout=5)
    import wandb

    # Unhooks W&B from the exit of the process, which would report that its helper is gone.
    with contextlib.suppress(Exception):
        wandb.teardown(exit_code=1)


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
