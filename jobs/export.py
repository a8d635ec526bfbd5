"""Write a checkpoint as a PEFT adapter or as a merged Hugging Face model.

    python -m jobs.export runs/my_run/checkpoints/step-000040 --format merged-hf --out my_model

Runs on CPU, with the memory of one tensor. CHECKPOINT may also be the folder of all checkpoints: then the latest one is
taken. Both may be URIs, such as s3://bucket/path/my_run/step-000040.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rl_actors.driver.checkpoint_storage import fetch
from rl_actors.driver.checkpoint_store import LATEST, named_by, verify_or_offer
from rl_actors.errors import CheckpointError, RLActorsError
from rl_actors.paths import given_path, input_path, writable_folder
from rl_actors.trainer.export import export_merged, export_peft
from rl_actors.trainer.shard_files import TrainerState


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 with one sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m jobs.export", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", help="a folder or URI step-..., or of all checkpoints")
    parser.add_argument("--format", choices=("peft", "merged-hf"), required=True)
    parser.add_argument("--out", type=Path, required=True, help="a folder that is not there yet")
    parser.add_argument("--base", type=Path, help="the base model's folder; by default the one it was trained from")
    arguments = parser.parse_args(argv)
    try:
        if ":/" in str(arguments.out):
            raise CheckpointError(f"--out {arguments.out} is not a folder of this machine: write there, then upload it")
        writable_folder(arguments.out.parent, "the folder of --out")
        with tempfile.TemporaryDirectory(prefix="rl_actors-export-") as fetched:
            given = arguments.checkpoint
            checkpoint = fetch(given, Path(fetched)) if "://" in given else _resolve(given_path(given))
            verify_or_offer(checkpoint)
            _export(checkpoint, arguments.format, arguments.out, arguments.base)
    except RLActorsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.format} written to {arguments.out}")
    return 0


def _resolve(folder: Path) -> Path:
    """The checkpoint itself, or the latest of a folder of checkpoints."""
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint {folder} is not a folder, such as runs/NAME/checkpoints/step-000040")
    latest = folder / LATEST
    return folder / named_by(latest.read_bytes(), latest) if latest.is_file() else folder


def _export(checkpoint: Path, form: str, out: Path, base: Path | None) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task(f"{form}: tensors", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        if form == "peft":
            export_peft(checkpoint, out, progress)
        else:
            export_merged(base or input_path(TrainerState.read(checkpoint).base), checkpoint, out, progress)


if __name__ == "__main__":
    sys.exit(main())
