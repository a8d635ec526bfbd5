"""Accuracy of the tiny model on rows of the task, sampled with plain Hugging Face generation."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from jobs.tiny_model.training import chat_text

MAX_NEW_TOKENS = 24


@torch.no_grad()
def answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, questions: list[str], temperature: float, seed: int = 0
) -> list[str]:
    """One answer to each question; temperature 0 takes the most likely token."""
    texts = [chat_text(question, tokenizer) for question in questions]
    inputs = tokenizer(texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    generate: Any = model.generate
    output = generate(
        input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=MAX_NEW_TOKENS, **sampling
    )
    return tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)


def accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, Any]],
    temperature: float,
    seed: int = 0,
) -> float:
    """Share of rows whose answer ends in exactly the right `<answer>...</answer>`."""
    texts = answers(model, tokenizer, [row["question"] for row in rows], temperature, seed)
    right = [text.endswith(f"<answer>{row['answer']}</answer>") for text, row in zip(texts, rows, strict=True)]
    return sum(right) / len(rows)
