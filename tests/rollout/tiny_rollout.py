"""Tiny random models in Hugging Face form, the run configuration for them, and transformers as the oracle."""

from __future__ import annotations

import string
from pathlib import Path

import numpy as np
import torch

from rl_actors.config import RunConfig
from rl_actors.types import Prompt

CHARACTERS = string.ascii_lowercase + string.digits + " +-*/=?.,:()\n"
SPECIAL = ("<pad>", "<eos>", "<unk>")
EOS = SPECIAL.index("<eos>")
VOCAB = len(SPECIAL) + len(CHARACTERS)


def make_model(folder: Path, arch: str, seed: int = 0) -> Path:
    """A random Qwen3 or Qwen3-MoE with a tokenizer of single characters. Sharp enough that tokens have a preference."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    if arch == "moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def run_config(model: Path, **rollout) -> RunConfig:
    # The KV cache holds half of what 32 full sequences need, so a full engine has to preempt.
    small = {"max_model_len": 256, "max_new_tokens": 12, "max_num_seqs": 32, "kv_cache_gib": 0.004}
    return RunConfig.model_validate(
        {
            "run_dir": str(model.parent / "run"),
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"train": "unused.jsonl"},
            "rollout": small | rollout,
            "timeouts": {"rollout_s": 60, "start_s": 600},
        }
    )


def make_prompt(name: str, length: int = 9) -> Prompt:
    """A prompt of random tokens, the same for a name."""
    generator = np.random.default_rng(list(name.encode()))
    return Prompt(name, generator.integers(len(SPECIAL), VOCAB, length).astype(np.int32), name)


def reference_logprobs(model: Path, prompt: Prompt, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """float32 [T]: log-probabilities that transformers gives the tokens of an answer."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.from_numpy(np.concatenate([prompt.token_ids, token_ids]).astype(np.int64))[None]
    with torch.no_grad():
        logits = network(ids).logits[0, len(prompt.token_ids) - 1 : -1] / (temperature or 1.0)
    logprobs = torch.log_softmax(logits, dim=-1)
    return logprobs.gather(-1, torch.from_numpy(token_ids.astype(np.int64))[:, None])[:, 0].numpy()
