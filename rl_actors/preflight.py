"""Everything that can be known to be wrong before a pool starts, checked without torch, Ray or a GPU.

Invariant: what passes here fails later only for reasons outside the configuration (machines, memory, time).
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from placement.layout import EngineLayout, MegatronLayout
from placement.model_shape import ModelShape
from rl_actors.config import RunConfig
from rl_actors.data.chat import load_tokenizer
from rl_actors.data.prompts import load_prompts
from rl_actors.errors import ConfigError
from rl_actors.lora_config import LoraConfig
from rl_actors.paths import input_path, output_path, writable_folder
from rl_actors.rewards.registry import resolve
from rl_actors.targets import Sizes, adapted_linears, check_targets
from rl_actors.types import Prompt
from rl_actors.weight_sync.slot_rank import SLOT_RANKS, slot_rank
from rl_actors.weight_sync.transport import choose_transport

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """What the checks read on the way: the run's prompts, and the sizes that planning needs."""

    config: RunConfig
    shape: ModelShape
    layout: MegatronLayout
    engines: EngineLayout
    train_prompts: list[Prompt]
    eval_prompts: list[Prompt]


def prepare(config: RunConfig) -> Prepared:
    """Check a configuration against its model folder, data and reward.

    Returns:
        The configuration with absolute paths, and all prompts as token ids.

    Raises:
        ConfigError: what is wrong, where, and what to write instead.
    """
    config = with_absolute_paths(config)
    check_run_dir(config.run_path)
    check_storage(config.checkpoint.storage)
    shape, layout, engines = check_model(config)
    _warn_of_unused_rank(config.lora, shape)
    check_files(config)
    check_init_from(config.lora, shape)
    resolve(config.reward.function, config.reward.kwargs)
    tokenizer = load_tokenizer(config.model.path)
    train = load_prompts(config.data, tokenizer, "train", _prompt_limit(config))
    held_out = load_prompts(config.data, tokenizer, "eval", _prompt_limit(config)) if config.data.eval else []
    if config.data.eval and len(held_out) < config.evaluation.prompts:
        logger.info(
            "evaluation.prompts is %d, data.eval has %d: all are used", config.evaluation.prompts, len(held_out)
        )
    return Prepared(config, shape, layout, engines, train, held_out[: config.evaluation.prompts])


def check_model(config: RunConfig) -> tuple[ModelShape, MegatronLayout, EngineLayout]:
    """Check the model's config.json, and that both layouts can cut the model. Raises ConfigError."""
    folder = Path(config.model.path)
    if not folder.is_dir():
        raise ConfigError(
            f"model.path {config.model.path} is not a folder: give a Hugging Face model's folder "
            "(config.json, safetensors, tokenizer.json), tiny:moe or tiny:dense, or, to plan without weights, a shape "
            "such as shape:qwen3-30b-a3b"
        )
    shape = ModelShape.from_folder(folder, config.model.layers)
    layout, engines = MegatronLayout.from_config(config.trainer), EngineLayout.from_config(config.rollout)
    layout.check_model(shape)
    engines.check_model(shape)
    _check_sizes(config, shape)
    check_rank(config.lora, check_targets(config.lora, shape, config.placement.device), shape)
    return shape, layout, engines


def check_files(config: RunConfig) -> None:
    """The model folder holds what a run reads of it besides config.json. Raises ConfigError."""
    folder = Path(config.model.path)
    for pattern in ("tokenizer.json",) if config.model.random_weights else ("*.safetensors", "tokenizer.json"):
        if not any(folder.glob(pattern)):
            raise ConfigError(
                f"model.path {folder} holds no {pattern}: give the folder of a whole Hugging Face model"
                + ("" if pattern == "tokenizer.json" else ", or set model.random_weights=true for a rehearsal")
            )
    if not config.model.random_weights:
        check_weights(folder)


def check_rank(lora: LoraConfig, adapted: Sizes, shape: ModelShape) -> None:
    """An adapter's rank is at most the shorter side of its weight; a larger one adds nothing but size."""
    spare = {name: _rank_of(lora, name, shape) - min(size) for name, size in adapted.items()}
    largest = min(spare, key=lambda name: spare[name])
    if spare[largest] > 0:
        out, width = adapted[largest]
        raise ConfigError(
            f"lora.rank = {lora.rank} is more than any adapted linear can use (the largest, {largest}, is {out} x "
            f"{width}): use at most {lora.rank * min(out, width) // _rank_of(lora, largest, shape)}"
        )


def _warn_of_unused_rank(lora: LoraConfig, shape: ModelShape) -> None:
    for name, (out, width) in adapted_linears(shape, lora).items():
        if _rank_of(lora, name, shape) > min(out, width):
            logger.warning(
                "lora.rank is %d, of which %s (%d x %d) uses %d", lora.rank, name, out, width, min(out, width)
            )
            return


def _rank_of(lora: LoraConfig, name: str, shape: ModelShape) -> int:
    return lora.rank // shape.topk if lora.normalize_moe_lora and ".experts." in name else lora.rank


def _check_sizes(config: RunConfig, shape: ModelShape) -> None:
    """Settings that must agree with the model or with each other."""
    length, rank, tp = config.rollout.max_model_len, config.lora.rank, config.trainer.tp
    if shape.max_positions and length > shape.max_positions:
        raise ConfigError(
            f"rollout.max_model_len = {length} is more than the model's {shape.max_positions} positions "
            f"(max_position_embeddings): use at most {shape.max_positions}"
        )
    if rank % tp:
        raise ConfigError(f"lora.rank = {rank} is not a multiple of trainer.tp = {tp}: use {-(-rank // tp) * tp}")
    if config.lora.normalize_moe_lora and shape.is_moe and rank % shape.topk:
        raise ConfigError(
            f"lora.rank = {rank} is not a multiple of the {shape.topk} experts that a token visits, by which "
            f"lora.normalize_moe_lora divides it: use {-(-rank // shape.topk) * shape.topk}"
        )
    if config.sync.mode == "adapter":
        _check_adapter_mode(config)
    if config.placement.device != "auto":
        device = "cpu" if config.placement.device == "cpu" else "cuda"
        choose_transport(config.sync.transport, device, config.placement.colocate)
    if config.placement.device == "cpu" and config.rollout.sleep != "never":
        raise ConfigError(
            f"rollout.sleep is {config.rollout.sleep} and on CPU an engine keeps its memory: set it to never"
        )
    if config.placement.device == "cpu":
        for name, size in (("rollout.tp", config.rollout.tp), ("trainer.cp", config.trainer.cp)):
            if size > 1:
                raise ConfigError(f"{name} = {size} needs GPUs and placement.device is cpu: use {name} = 1")


def _check_adapter_mode(config: RunConfig) -> None:
    """What vLLM's own LoRA can hold."""
    lora = config.lora
    if slot_rank(lora.rank) is None:
        raise ConfigError(
            f"lora.rank = {lora.rank} is more than vLLM's LoRA takes (at most {SLOT_RANKS[-1]}): lower it, or use "
            "sync.mode = merged"
        )
    if str(lora.variant) != "lora":
        raise ConfigError(
            f"lora.variant = {lora.variant} is not one A and one B for each linear, which is all that goes into vLLM's "
            "LoRA: use sync.mode = merged"
        )
    if config.placement.device == "gpu" and config.model.dtype == "float32":
        raise ConfigError(
            "model.dtype is float32, and vLLM's LoRA kernels on GPU take bfloat16 only: use model.dtype = bfloat16, or "
            "sync.mode = merged"
        )


def check_run_dir(path: Path) -> None:
    """Refuse a run folder that could not be made or written. Nothing is created."""
    writable_folder(path, "run_dir")


def check_storage(uri: str | None) -> None:
    """Refuse a `checkpoint.storage` that names no kind of storage. It is first touched by the driver, on its node."""
    if uri is None:
        return
    from pyarrow import ArrowException
    from pyarrow.fs import FileSystem, LocalFileSystem

    try:
        files, path = FileSystem.from_uri(uri)
    except (OSError, ArrowException, ValueError) as error:
        raise ConfigError(
            f"checkpoint.storage {uri} is not usable ({' '.join(str(error).split())}): "
            "give s3://bucket/path, gs://bucket/path, file:///folder or a folder"
        ) from error
    if isinstance(files, LocalFileSystem):
        writable_folder(Path(path), "checkpoint.storage")


def check_init_from(lora: LoraConfig, shape: ModelShape) -> None:
    """Refuse a `lora.init_from` whose rank, alpha, targets or model are not the run's."""
    if lora.init_from is None:
        return
    from rl_actors.trainer.peft_start import PeftFolder

    if lora.share_expert_adapters:
        raise ConfigError("lora.init_from gives each expert its own adapter: set lora.share_expert_adapters to false")
    PeftFolder(Path(lora.init_from), shape).check(lora)


def check_weights(folder: Path) -> None:
    """Every shard is there and has a readable header; tensors are not read. Raises ConfigError."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        for shard in _shards(index):
            if not (folder / shard).is_file():
                raise ConfigError(f"{index} names {shard}, which is missing: download the whole model again")
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                start = file.read(20)
            if not start:
                raise ConfigError(f"{path} is empty: download the model again")
            if start.startswith(b"version https://git"):
                raise ConfigError(f"{path} is a Git-LFS pointer, not the weights: run `git lfs pull` in {folder}")
            with safe_open(path, framework="numpy") as tensors:
                tensors.keys()
        except (SafetensorError, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(f"{path} is not a whole safetensors file ({reason}): download it again") from error


def _shards(index: Path) -> list[str]:
    try:
        return sorted({str(shard) for shard in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError, OSError) as error:
        raise ConfigError(f"{index} is not a safetensors index: download it again") from error


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The same configuration, meaning the same files from any folder and on any actor."""
    data = config.data.model_copy(
        update={name: _absolute(value) for name in ("train", "eval") if (value := getattr(config.data, name))}
    )
    model = config.model.model_copy(update={"path": _absolute(config.model.path)})
    storage = config.checkpoint.storage
    if storage is not None and "://" not in storage:
        storage = str(output_path(storage))
    checkpoint = config.checkpoint.model_copy(update={"storage": storage})
    start = config.lora.init_from
    lora = config.lora.model_copy(update={"init_from": None if start is None else str(input_path(start))})
    changed = {"run_dir": str(config.run_path), "data": data, "model": model, "checkpoint": checkpoint, "lora": lora}
    return config.model_copy(update=changed)


def _absolute(path: str) -> str:
    """The absolute path if there is something, else as given (it may be a name on the Hugging Face hub)."""
    return str(found) if (found := input_path(path)).exists() else path


def _prompt_limit(config: RunConfig) -> int:
    """Longest prompt in tokens that leaves room for a whole answer."""
    return min(config.data.max_prompt_tokens, config.rollout.max_model_len - config.rollout.max_new_tokens)
