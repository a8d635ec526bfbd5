"""Supervised training of the tiny model from random weights: the same seed gives the same bits.

The model first learns to calculate, from stepwise answers, then picks up the habits that `TaskSettings` describes.
The loss counts answer tokens only.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from jobs.tiny_model.settings import TaskSettings, TrainingSettings
from jobs.tiny_model.task import entries, habitual_answer, stepwise_answer

IGNORED = -100


def train(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerFast,
    task: TaskSettings,
    settings: TrainingSettings,
    seed: int,
    progress: bool = True,
) -> PreTrainedModel:
    """A float32 model in eval mode, trained on the "sft" split of the task."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_factor(step, settings))
    batches = _batches(task, settings, seed)
    bar = tqdm(range(settings.steps), desc="training the base model", unit="step", disable=not progress)
    for _ in bar:
        texts = next(batches)
        loss = answer_loss(model, *encode(texts, tokenizer))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return model.eval()


def _batches(task: TaskSettings, settings: TrainingSettings, seed: int) -> Iterator[list[tuple[str, str]]]:
    """Endless batches of questions and answers."""
    rng = random.Random(seed)
    for step, batch in enumerate(itertools.batched(entries(task, "sft", seed), settings.batch)):
        learning = step < settings.stepwise_part * settings.steps
        yield [(entry["question"], _answer(entry, task, rng, learning)) for entry in batch]


def _answer(entry: dict[str, Any], task: TaskSettings, rng: random.Random, learning: bool) -> str:
    return stepwise_answer(entry["metadata"]["expression"]) if learning else habitual_answer(entry, task, rng)


def encode(texts: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Questions and answers as right-padded int64 [B, L] tokens and labels (IGNORED outside of the answer)."""
    prompts = tokenizer([chat_text(question, tokenizer) for question, _ in texts], add_special_tokens=False).input_ids
    answers = tokenizer([answer + tokenizer.eos_token for _, answer in texts], add_special_tokens=False).input_ids
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    tokens_BL = torch.full((len(texts), length), tokenizer.pad_token_id)
    labels_BL = torch.full((len(texts), length), IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        tokens_BL[row, :end] = torch.tensor(prompt + answer)
        labels_BL[row, len(prompt) : end] = torch.tensor(answer)
    return tokens_BL, labels_BL


def chat_text(question: str, tokenizer: PreTrainedTokenizerFast) -> str:
    """The question in the chat template, ready to be answered."""
    turn = [{"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))


def answer_loss(model: PreTrainedModel, tokens_BL: torch.Tensor, labels_BL: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy over answer tokens. Padding is on the right, so the causal mask already hides it."""
    hidden_BLH = model.model(input_ids=tokens_BL, use_cache=False).last_hidden_state
    labels_BL = labels_BL[:, 1:]
    answered = labels_BL != IGNORED
    return cross_entropy(model.lm_head(hidden_BLH[:, :-1][answered]), labels_BL[answered])


def _lr_factor(step: int, settings: TrainingSettings) -> float:
    """Linear warm-up, then linear decay to a twentieth."""
    return min(1.0, (step + 1) / settings.warmup) * (1.0 - 0.95 * step / settings.steps)
