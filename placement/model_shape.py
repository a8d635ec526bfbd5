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

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> ModelShape:
        """Read the dictionary of a config.json (Qwen2, Qwen3, Qwen3-MoE, Llama, Mixtral and their like).

        Raises:
            ConfigError: a size is missing; the sentence names its key.
        """
        config = config.get("text_config") or config
        hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        layers = _size(config, "num_hidden_layers")
        experts = int(_first(config, "num_experts", "num_local_experts", "n_routed_experts") or 0)
        moe_layers = _count_moe_layers(config, layers) if experts else 0
        model_type = str(config.get("model_type", ""))
        return cls(
            num_layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            ffn=_size(config, "intermediate_size") if moe_layers < layers else 0,
            moe_ffn=int(config.get("moe_intermediate_size") or _size(config, "intermediate_size")) if experts else 0,
            experts=experts,
            topk=_size(config, "num_experts_per_tok") if experts else 0,
            vocab=_size(config, "vocab_size"),
            tied=bool(config.get("tie_word_embeddings", False)),
            moe_layers=moe_layers,
            qk_norm=model_type.startswith("qwen3"),
            attention_bias=bool(config.get("attention_bias", model_type == "qwen2")),
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelShape:
        """Read `folder`/config.json.

        Raises:
            ConfigError: the folder or the file is missing, or it is not a model's config.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ConfigError(f"model.path {folder} holds no config.json: give a folder of a Hugging Face model")
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(config, dict):
            raise ConfigError(f"{path} holds a {type(config).__name__}, not the settings of a model")
        return cls.from_hf_config(config)


def _count_moe_layers(config: dict[str, Any], layers: int) -> int:
    step = int(config.get("decoder_sparse_step") or 1)
    dense_only = set(config.get("mlp_only_layers") or ()) | set(range(int(config.get("first_k_dense_replace") or 0)))
    return sum(1 for layer in range(layers) if layer not in dense_only and (layer + 1) % step == 0)


def _first(config: dict[str, Any], *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _size(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"the model's config.json needs a positive {key!r}, it has {value!r}")
    return value
