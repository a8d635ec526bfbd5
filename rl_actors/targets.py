"""Which linears `lora.targets` and `lora.exclude` name, known from a model's sizes before it is built.

Invariant: what is refused here matches nothing of the built model. There names are Megatron's, with the layer and
expert numbers of the whole model; on CPU every expert is a module, on GPU those of a layer are one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches

from placement.model_shape import ModelShape
from rl_actors.errors import ConfigError
from rl_actors.lora_config import LoraConfig

Sizes = dict[str, tuple[int, int]]
OUTPUT_LAYER = "output_layer"


def selects(pattern: str, path: str) -> bool:
    """Whether a target or exclusion names the module `path`: by its last name, or with * for any text."""
    if pattern == path.rpartition(".")[2]:
        return True
    first, *parts = pattern.split("*")
    if not parts:
        return pattern == path
    if not path.startswith(first):
        return False
    at = len(first)
    for part in parts[:-1]:
        found = path.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return len(path) - len(parts[-1]) >= at and path.endswith(parts[-1])


def adapted_linears(shape: ModelShape, lora: LoraConfig, device: str = "auto") -> Sizes:
    """(out, in) of every linear that gets an adapter, by the adapter's name."""
    return {
        name: size
        for name, size in linears(shape, lora.variant == "canonical_lora")
        if _any(lora.targets, _paths(name, device)) and not _any(lora.exclude, _paths(name, device))
    }


def check_targets(lora: LoraConfig, shape: ModelShape, device: str = "auto") -> Sizes:
    """Every target and exclusion names a linear of the model, and something is left to adapt.

    Returns:
        `adapted_linears`.

    Raises:
        ConfigError: names the pattern, and what is near.
    """
    names = [name for name, _ in linears(shape, lora.variant == "canonical_lora")]
    paths = list(dict.fromkeys(path for name in names for path in _paths(name, device)))
    for field, patterns in (("targets", lora.targets), ("exclude", lora.exclude)):
        for pattern in patterns:
            if not _any((pattern,), [*paths, OUTPUT_LAYER]):
                raise ConfigError(
                    f"lora.{field}: {pattern!r} matches no linear of the model: {_advice(pattern, paths, shape)}"
                )
    if _any(lora.targets, [OUTPUT_LAYER]) and not _any(lora.exclude, [OUTPUT_LAYER]):
        raise ConfigError(
            "lora.targets reach the output layer, which stays frozen: its gradient would need the logits of all "
            "tokens; add output_layer to lora.exclude"
        )
    adapted = adapted_linears(shape, lora, device)
    if not adapted:
        raise ConfigError(
            f"lora.exclude takes away all that lora.targets adapt ({', '.join(lora.targets)}): leave something to train"
        )
    return adapted


def _advice(pattern: str, paths: list[str], shape: ModelShape) -> str:
    """What is wrong with the pattern: its last name, its layer or expert, or the way between them."""
    block, dot, leaf = pattern.rpartition(".")
    leaves = sorted({path.rpartition(".")[2] for path in paths})
    if "*" not in leaf and leaf not in leaves:
        near = get_close_matches(leaf, leaves, n=2, cutoff=0.4) or leaves
        return f"did you mean {' or '.join(block + dot + name for name in near)}?"
    for kind, count in (("layers", shape.num_layers), ("experts", shape.experts)):
        for number in re.findall(rf"\b{kind}\.(\d+)\b", pattern):
            if int(number) >= count > 0:
                return f"its {kind} are 0 to {count - 1}"
    first = [path for path in paths if ".layers.0." in path and path.rpartition(".")[2] == leaf]
    near = get_close_matches(pattern, first or paths[:8], n=2, cutoff=0.0)
    return f"its linears have names such as {' and '.join(near)}"


def _any(patterns: tuple[str, ...], paths: list[str]) -> bool:
    return any(selects(pattern, path) for pattern in patterns for path in paths)


def _paths(name: str, device: str) -> list[str]:
    """Where the linear of an adapter stands in the built model, on one device or on either."""
    local = re.sub(r"\.experts\.(\d+)\.", r".experts.local_experts.\1.", name)
    grouped = re.sub(r"\.experts\.\d+\.", ".experts.", name)
    return [f"decoder.{path}" for path in {"cpu": {local}, "gpu": {grouped}}.get(device, {local, grouped})]


def linears(shape: ModelShape, canonical: bool) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name and (out, in) of all linears of the layers.

    Where some layers are dense and some have experts, every layer has both here: only the built model knows which.
    """
    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    qkv = {"linear_q": query, "linear_k": key_value, "linear_v": key_value}
    experts = [f"experts.{expert}." for expert in range(shape.experts)] if shape.moe_layers else []
    blocks = [(block, shape.moe_ffn) for block in experts] + ([("", shape.ffn)] if shape.dense_layers else [])
    for layer in range(shape.num_layers):
        attention = f"layers.{layer}.self_attention"
        for name, out in (qkv if canonical else {"linear_qkv": query + 2 * key_value}).items():
            yield f"{attention}.{name}", (out, shape.hidden)
        yield f"{attention}.linear_proj", (shape.hidden, query)
        for block, ffn in blocks:
            gated = {"linear_fc1_gate": ffn, "linear_fc1_up": ffn}
            for name, out in (gated if canonical else {"linear_fc1": 2 * ffn}).items():
                yield f"layers.{layer}.mlp.{block}{name}", (out, shape.hidden)
            yield f"layers.{layer}.mlp.{block}linear_fc2", (shape.hidden, ffn)
