"""Shapes of the tiny models: about one million parameters, divisible by 2 in every way a layout may cut them.

Heads, key-value heads, experts, layers, widths and vocabulary are even, and there are at least 4 experts, so TP2, PP2,
EP2, EP4 and their products fit. head_dim is 32 because vLLM's CPU attention needs that much.
"""

from __future__ import annotations

from transformers import PreTrainedConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

from jobs.tiny_model.settings import Arch

MAX_POSITIONS = 2048


def make_config(arch: Arch, tokenizer: PreTrainedTokenizerFast, hidden: int = 128, layers: int = 4) -> PreTrainedConfig:
    """The Hugging Face configuration of a tiny Qwen3-MoE or Qwen3."""
    common = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "initializer_range": 0.05,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "dtype": "float32",
    }
    if arch == "dense":
        return Qwen3Config(intermediate_size=4 * hidden, **common)
    return Qwen3MoeConfig(
        intermediate_size=4 * hidden,
        moe_intermediate_size=hidden // 2,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        output_router_logits=False,
        **common,
    )
