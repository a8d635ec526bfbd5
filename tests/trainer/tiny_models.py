"""Tiny random Qwen3 and Qwen3-MoE models in Hugging Face format, and their own log-probabilities."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from rl_actors.types import TrainBatch

VOCAB = 96


def save_tiny_model(
    folder: Path,
    arch: str,
    tied: bool = False,
    layers: int = 2,
    vocab: int = VOCAB,
    heads: int = 4,
    kv_heads: int = 2,
    experts: int = 4,
) -> Path:
    """Write a model of ~100k parameters. `arch` is "dense", "biased" (Qwen2) or "moe" (top-2 of the experts)."""
    import transformers

    sizes = {
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 32,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 256,
    }
    torch.manual_seed(7)
    if arch == "dense":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    elif arch == "biased":
        del sizes["head_dim"]
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))
    else:
        moe = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **moe))
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than the usual initial values, so that every part moves the output.
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, safe_serialization=True)
    return folder


def make_batch(sequences: int = 6, seed: int = 3) -> TrainBatch:
    """Random sequences of different lengths with random advantages; loss weights are the token mean."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(2, 9, sequences).astype(np.int32)
    responses = rng.integers(1, 12, sequences).astype(np.int32)
    total = int(responses.sum())
    return TrainBatch(
        tokens=rng.integers(0, VOCAB, int((prompts + responses).sum())).astype(np.int32),
        prompt_lengths=prompts,
        response_lengths=responses,
        sampler_logprobs=(-4.5 + 0.1 * rng.standard_normal(total)).astype(np.float32),
        advantages=rng.standard_normal(total).astype(np.float32),
        loss_weights=np.full(total, 1.0 / total, dtype=np.float32),
    )


def huggingface_logprobs(folder: Path, batch: TrainBatch, temperature: float) -> np.ndarray:
    """float32 [R] by transformers, one sequence at a time: the oracle."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    offsets, out = batch.token_offsets, []
    for index in range(len(batch)):
        tokens = torch.from_numpy(batch.tokens[offsets[index] : offsets[index + 1]].astype(np.int64))
        with torch.no_grad():
            logits = model(tokens[None]).logits[0].float() / temperature
        logprobs = torch.log_softmax(logits, dim=-1)
        start = int(batch.prompt_lengths[index])
        out.append(logprobs[start - 1 : -1].gather(1, tokens[start:, None])[:, 0])
    return torch.cat(out).numpy()
