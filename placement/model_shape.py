"""The sizes of a model that planning needs, read from a Hugging Face config.json.

Invariant: nothing here opens weights or imports transformers, so a plan can be made before anything is loaded.
A config whose sizes are missing is a ConfigError that names the key.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_actors.errors import ConfigError


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer with grouped-query attention and gated (SwiGLU) feed-forward layers.

    Attributes:
        num_layers, hidden, heads, kv_heads, head_dim: the usual sizes.
        ffn: inner size of a dense feed-forward layer; 0 if no layer is dense.
        moe_ffn: inner size of one expert; 0 on a dense model.
        experts: experts of a mixture-of-experts layer; 0 on a dense model.
        topk: experts that one token visits.
        vocab: rows of the embedding, without Megatron's padding.
        tied: the output layer is the embedding itself.
        moe_layers: how many of the layers have experts.
        qk_norm: queries and keys of each head have a norm (Qwen3).
        attention_bias: the query, key and value projections have a bias (Qwen2).
        max_positions: longest sequence the model was made for, stretched by its RoPE scaling; 0 if it does not say.
    """

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    moe_ffn: int
    experts: int
    topk: int
    vocab: int
    tied: bool
    moe_layers: int = 0
    qk_norm: bool = False
    attention_bias: bool = False
    max_positions: int = 0

    @property
    def is_moe(self) -> bool:
        return self.experts > 0

    @property
    def dense_layers(self) -> int:
        return self.num_layers - self.moe_layers

    @property
    def attention_parameters(self) -> int:
        """Projections of one layer's attention; norms are counted in `norm_parameters`."""
        query, key_value = self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim
        bias = query + key_value if self.attention_bias else 0
        return self.hidden * (query + key_value) + query * self.hidden + bias

    @property
    def norm_parameters(self) -> int:
        """Norms of one layer."""
        return 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def expert_parameters(self) -> int:
        """One expert: gate, up and down."""
        return 3 * self.hidden * self.moe_ffn

    @property
    def parameters(self) -> int:
        """All parameters of the model, tied embeddings counted once."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        layers = self.num_layers * (self.attention_parameters + self.norm_parameters)
        dense = self.dense_layers * 3 * self.hidden * self.ffn
        sparse = self.moe_layers * (self.experts * self.expert_parameters + self.experts * self.hidden)
        return embeddings + layers + dense + sparse + self.hidden

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with: of its chosen experts only, and of the output layer."""
        dense = self.dense_layers * 3 * self.hidden * self.ffn
        sparse = self.moe_layers * (self.topk * self.expert_parameters + self.experts * self.hidden)
        return self.num_layers * self.attention_parameters + dense + sparse + self.vocab * self.hidden

    def forward_flops(self, length: int) -> int:
        """Floating-point operations of one sequence's forward pass: matrix products, and causal attention's square."""
        attention = self.num_layers * self.heads * self.head_dim * length
        return 2 * length * (self.active_parameters + attention)

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> ModelShape:
        """Read the dictionary of a config.json (Qwen2, Qwen3, Qwen3-MoE, Llama, Mixtral and their like).

        Raises:
            ConfigError: a size is missing or unusable; the sentence names its key.
        """
        config = _text_config(config)
        hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        layers = _size(config, "num_hidden_layers")
        experts = _count_experts(config)
        topk = _size(config, "num_experts_per_tok") if experts else 0
        if topk > experts:
            raise ConfigError(f"the model's config.json has num_experts_per_tok = {topk} but only {experts} experts")
        moe_layers = _count_moe_layers(config, layers) if experts else 0
        model_type = str(config.get("model_type", ""))
        return cls(
            num_layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=_size(config, "num_key_value_heads", heads),
            head_dim=_size(config, "head_dim", hidden // heads),
            ffn=_size(config, "intermediate_size") if moe_layers < layers else 0,
            moe_ffn=_size(config, _first(config, "moe_intermediate_size") or "intermediate_size") if experts else 0,
            experts=experts,
            topk=topk,
            vocab=_size(config, "vocab_size"),
            tied=bool(config.get("tie_word_embeddings", False)),
            moe_layers=moe_layers,
            qk_norm=model_type.startswith("qwen3"),
            attention_bias=bool(config.get("attention_bias", model_type == "qwen2")),
            max_positions=_max_positions(config),
        )

    @classmethod
    def from_folder(cls, folder: str | Path, layers: int | None = None) -> ModelShape:
        """Read `folder`/config.json, cut to the first `layers`.

        Raises:
            ConfigError: the folder or the file is missing, it is not a model's config, or it has fewer layers.
        """
        return cls.from_hf_config(_read_config(folder) | layer_cut(folder, layers))


def layer_cut(folder: str | Path, layers: int | None) -> dict[str, Any]:
    """The settings of `folder`/config.json that change when only the first `layers` are kept; none if all are.

    Raises:
        ConfigError: the model has fewer layers, or keeps its sizes where they cannot be cut.
    """
    if layers is None:
        return {}
    config = _read_config(folder)
    if "text_config" in config:
        raise ConfigError(f"model.layers cannot cut {folder}: its config.json has a text_config; leave it out")
    have = _size(config, "num_hidden_layers")
    if layers > have:
        raise ConfigError(f"model.layers = {layers} is more than the model's {have} layers: use at most {have}")
    listed = {key: config[key][:layers] for key in _PER_LAYER if isinstance(config.get(key), list)}
    return {"num_hidden_layers": layers, **listed}


_PER_LAYER = ("layer_types", "mlp_layer_types")
"""Settings with one entry for each layer."""


def _read_config(folder: str | Path) -> dict[str, Any]:
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(f"model.path {folder} holds no config.json: give a folder of a Hugging Face model")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a {type(config).__name__}, not the settings of a model")
    return config


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    inner = config.get("text_config")
    if inner is not None and not isinstance(inner, dict):
        raise ConfigError(f"the model's config.json needs an object as 'text_config', it has {inner!r}")
    return inner or config


def _count_experts(config: dict[str, Any]) -> int:
    key = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
    return _size(config, key, least=0) if key else 0


def _count_moe_layers(config: dict[str, Any], layers: int) -> int:
    step, dense_first = _size(config, "decoder_sparse_step", 1), _size(config, "first_k_dense_replace", 0, least=0)
    listed = config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise ConfigError(f"the model's config.json needs a list of layers as 'mlp_only_layers', it has {listed!r}")
    dense_only = {*listed, *range(dense_first)}
    return sum(1 for layer in range(layers) if layer not in dense_only and (layer + 1) % step == 0)


def _max_positions(config: dict[str, Any]) -> int:
    positions = _size(config, "max_position_embeddings", 0, least=0)
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    factor = scaling.get("factor") if isinstance(scaling, dict) else None
    return int(positions * factor) if isinstance(factor, int | float) and factor > 1 else positions


def _first(config: dict[str, Any], *keys: str) -> str | None:
    """The first of the keys that has a value."""
    return next((key for key in keys if config.get(key) is not None), None)


def _size(config: dict[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    value = default if config.get(key) is None else config[key]
    if type(value) is not int or value < least:
        kind = "positive" if least else "non-negative"
        raise ConfigError(f"the model's config.json needs a {kind} {key!r}, it has {value!r}")
    return value
