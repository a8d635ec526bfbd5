"""Write the config.json and a tokenizer of a released model's sizes, for runs with `model.random_weights`.

    python -m jobs.make_shape qwen3-30b-a3b --out models/qwen3-30b-a3b-shape

Recipes may also name `shape:qwen3-30b-a3b` as their model: it is made in the user's cache. Nothing is downloaded:
the tokenizer has the model's number of ids but reads text byte by byte, so prompts are longer than with the real one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from jobs.cli import positive, run
from rl_actors.errors import ConfigError
from rl_actors.paths import cache_path, writable_folder

SHAPES = Path(__file__).resolve().parent / "shapes"


def make_shape(name: str, out: Path, layers: int | None = None) -> Path:
    """Write the folder; an older one of this command is replaced file by file.

    Raises:
        ConfigError: there is no shape of that name, or `out` cannot be written or holds a model's weights.
    """
    writable_folder(out, "--out")
    if any(out.glob("*.safetensors")):
        raise ConfigError(f"--out {out} holds a model's weights, whose config.json this would replace: give another")
    known = sorted(path.stem for path in SHAPES.glob("*.json"))
    if name not in known:
        raise ConfigError(f"shape:{name} names no model's sizes: use {' or '.join(f'shape:{one}' for one in known)}")
    config = json.loads((SHAPES / f"{name}.json").read_text(encoding="utf-8"))
    return write_shape(config | ({"num_hidden_layers": layers} if layers else {}), out)


def write_shape(config: dict[str, Any], out: Path) -> Path:
    """Write a config.json of these settings and a tokenizer of its vocabulary."""
    from jobs.shapes.tokenizer import make_tokenizer

    tokenizer = make_tokenizer(config["vocab_size"], config["max_position_embeddings"])
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    (out / "config.json").write_text(json.dumps(config | ids, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return out


def cached_shape(name: str) -> Path:
    """The folder of a shape in the user's cache, made if it is not there yet. Raises ConfigError."""
    folder = cache_path() / f"shape-{name}"
    if not (folder / "config.json").is_file():
        cache_path().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_path(), prefix=".shape-") as scratch:
            made = make_shape(name, Path(scratch) / "shape")
            try:
                made.rename(folder)
            except OSError:  # another process was first
                if not (folder / "config.json").is_file():
                    raise
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m jobs.make_shape", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("name", help="such as qwen3-30b-a3b")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--layers", type=positive, help="number of layers, if not the model's own")
    arguments = parser.parse_args()
    print(make_shape(arguments.name, arguments.out, arguments.layers))
    return 0


if __name__ == "__main__":
    run(main)
