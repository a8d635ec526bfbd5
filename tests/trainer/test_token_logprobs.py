"""Log-probabilities from hidden states, chunk by chunk, against log_softmax of whole logits in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tasks
import torch
from rank_process import RankFailed, RankProcesses, with_layout
from torch.utils._python_dispatch import TorchDispatchMode

from rl_actors.trainer.logprobs import CHUNK_BYTES, chunk_tokens, token_logprobs

RNG = np.random.default_rng(0)
HIDDEN = (2 * RNG.standard_normal((7, 8))).astype(np.float32)
WEIGHT = RNG.standard_normal((12, 8)).astype(np.float32)
TARGETS = np.array([0, 3, 5, 6, 9, 9, 1])


def oracle(vocab: int, temperature: float = 0.7) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(logprobs, entropy, gradient of the weighted sum) with rows from `vocab` on impossible."""
    hidden = torch.from_numpy(HIDDEN).double().requires_grad_()
    logits = hidden @ torch.from_numpy(WEIGHT).double().t()
    logprobs = torch.log_softmax(logits[:, :vocab] / temperature, dim=-1)
    chosen = logprobs[torch.arange(7), torch.from_numpy(TARGETS)]
    (chosen * torch.arange(1.0, 8.0)).sum().backward()
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    assert hidden.grad is not None
    return chosen.detach().numpy(), entropy.detach().numpy(), hidden.grad.numpy()


def ours(
    vocab: int = 12, temperature: float = 0.7, chunk: int | None = None, dtype: torch.dtype = torch.float32
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    hidden = torch.from_numpy(HIDDEN).to(dtype).requires_grad_()
    weight = torch.from_numpy(WEIGHT).to(dtype)
    logprobs, entropy = token_logprobs(hidden, weight, torch.from_numpy(TARGETS), temperature, vocab, chunk=chunk)
    (logprobs * torch.arange(1.0, 8.0)).sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == dtype and logprobs.dtype == torch.float32
    return logprobs.detach().numpy(), entropy.numpy(), hidden.grad.float().numpy()


@pytest.mark.parametrize("vocab", [12, 10])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("chunk", [None, 1, 3, 7])
def test_one_rank(vocab: int, temperature: float, chunk: int | None) -> None:
    for found, wanted in zip(ours(vocab, temperature, chunk), oracle(vocab, temperature), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("vocab", [12, 10, 6])
def test_two_ranks(rank_processes: RankProcesses, tiny_config: Any, vocab: int) -> None:
    """With 6 tokens, all rows of the second rank are padding."""
    config = with_layout(tiny_config("dense"), tp=2)
    targets = TARGETS % vocab
    answers = rank_processes.run(tasks.vocab_parallel, config, HIDDEN, WEIGHT, targets, vocab)
    hidden = torch.from_numpy(HIDDEN).requires_grad_()
    wanted, entropy = token_logprobs(hidden, torch.from_numpy(WEIGHT), torch.from_numpy(targets), 0.7, vocab)
    (wanted * torch.arange(1.0, 8.0)).sum().backward()
    for answer in answers:
        np.testing.assert_allclose(answer["logprobs"], wanted.detach(), rtol=1e-5, atol=2e-6)
        np.testing.assert_allclose(answer["entropy"], entropy, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(sum(answer["gradient"] for answer in answers), hidden.grad, rtol=1e-5, atol=5e-6)


def test_bfloat16_is_as_good_as_its_logits() -> None:
    for found, wanted, tolerance in zip(ours(dtype=torch.bfloat16), oracle(12), (0.1, 0.1, 0.5), strict=True):
        np.testing.assert_allclose(found, wanted, atol=tolerance)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [part.numel() for part in (out if isinstance(out, tuple | list) else [out]) if torch.is_tensor(part)]
        self.elements = max([self.elements, *sizes])
        return out


def test_no_tensor_of_all_tokens_and_the_whole_vocabulary() -> None:
    tokens, vocab, width, chunk = 64, 500, 8, 16
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight, targets = torch.randn(vocab, width), torch.randint(0, vocab, (tokens,))
    with LargestTensor() as largest:
        logprobs, _ = token_logprobs(hidden, weight, targets, 1.0, vocab, chunk=chunk)
        logprobs.sum().backward()
    assert largest.elements == chunk * vocab


def test_default_chunks_stay_within_their_size() -> None:
    assert chunk_tokens(151_936) == 768
    for columns in (37_984, 151_936, 262_144):
        assert 0.8 * CHUNK_BYTES < 4 * columns * chunk_tokens(columns) <= CHUNK_BYTES


def test_nothing_is_kept_without_gradient() -> None:
    logprobs, _ = token_logprobs(torch.from_numpy(HIDDEN), torch.from_numpy(WEIGHT), torch.from_numpy(TARGETS), 1.0, 12)
    assert not logprobs.requires_grad


def test_a_trained_output_layer_is_refused() -> None:
    weight = torch.from_numpy(WEIGHT).clone().requires_grad_()
    with pytest.raises(ValueError, match="frozen output layer"):
        token_logprobs(torch.from_numpy(HIDDEN), weight, torch.from_numpy(TARGETS), 1.0, 12)


def test_adapters_on_the_output_layer_are_refused(rank_processes: RankProcesses, tiny_config: Any) -> None:
    config = tiny_config("dense", lora={"targets": ["linear_qkv", "*output_layer"]})
    with pytest.raises(RankFailed, match=r"ConfigError: lora\.targets reach the output layer"):
        rank_processes.run(tasks.adapter_names, config)


def test_no_tokens() -> None:
    hidden = torch.zeros(0, 8, requires_grad=True)
    weight = torch.from_numpy(WEIGHT)
    logprobs, entropy = token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64), 1.0, 12)
    logprobs.sum().backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert hidden.grad is not None and hidden.grad.shape == (0, 8)
