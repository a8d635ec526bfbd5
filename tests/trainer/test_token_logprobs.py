"""Log-probabilities from logits split over the vocabulary, against log_softmax of the whole, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tasks
import torch
from rank_process import RankProcesses, with_layout

from rl_actors.trainer.logprobs import token_logprobs

RNG = np.random.default_rng(0)
LOGITS = (6 * RNG.standard_normal((7, 12))).astype(np.float32)
TARGETS = np.array([0, 3, 5, 6, 9, 9, 1])


def oracle(vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(logprobs, entropy, gradient of the weighted sum) with columns from `vocab` on impossible."""
    logits = torch.from_numpy(LOGITS).double().requires_grad_()
    logprobs = torch.log_softmax(logits[:, :vocab] / 0.7, dim=-1)
    chosen = logprobs[torch.arange(7), torch.from_numpy(TARGETS)]
    (chosen * torch.arange(1.0, 8.0)).sum().backward()
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    assert logits.grad is not None
    return chosen.detach().numpy(), entropy.detach().numpy(), logits.grad.numpy()


@pytest.mark.parametrize("vocab", [12, 10])
def test_one_rank(vocab: int) -> None:
    logits = torch.from_numpy(LOGITS).clone().requires_grad_()
    logprobs, entropy = token_logprobs(logits, torch.from_numpy(TARGETS), 0.7, vocab)
    (logprobs * torch.arange(1.0, 8.0)).sum().backward()
    expected = oracle(vocab)
    assert logits.grad is not None
    for found, wanted in zip((logprobs.detach(), entropy, logits.grad), expected, strict=True):
        np.testing.assert_allclose(found.numpy(), wanted, atol=5e-6)


@pytest.mark.parametrize("vocab", [12, 10])
def test_two_ranks(rank_processes: RankProcesses, tiny_config: Any, vocab: int) -> None:
    config = with_layout(tiny_config("dense"), tp=2)
    answers = rank_processes.run(tasks.vocab_parallel, config, LOGITS, TARGETS, vocab)
    logprobs, entropy, gradient = oracle(vocab)
    for answer in answers:
        np.testing.assert_allclose(answer["logprobs"], logprobs, atol=5e-6)
        np.testing.assert_allclose(answer["entropy"], entropy, atol=5e-6)
    found = np.concatenate([answer["gradient"] for answer in answers], axis=1)
    np.testing.assert_allclose(found, gradient, atol=5e-6)


def test_no_tokens() -> None:
    logits = torch.zeros(0, 12, requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.zeros(0, dtype=torch.int64), 1.0, 12)
    logprobs.sum().backward()
    assert logprobs.shape == entropy.shape == (0,)
