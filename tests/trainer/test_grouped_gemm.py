"""Grouped LoRA against one expert after the other, and its kernel in Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

COUNTS = [[5, 0, 3, 9], [0, 0, 17, 0], [0, 0, 0, 0]]


def ends_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def one_by_one(x, weight, a, b, counts, scale):
    """(W_e + scale * B_e A_e) x, expert by expert."""
    parts = x.split(counts)
    return torch.cat([part @ (weight[e] + scale * b[e] @ a[e]).T for e, part in enumerate(parts)])


@pytest.mark.parametrize("counts", COUNTS)
def test_output_and_gradients_are_those_of_each_expert_alone(counts: list[int]) -> None:
    from rl_actors.trainer.grouped_gemm import grouped_lora

    torch.manual_seed(0)
    tokens = sum(counts)
    x, a, b = torch.randn(tokens, 24), torch.randn(4, 8, 24), torch.randn(4, 16, 8)
    weight, upstream = torch.randn(4, 16, 24), torch.randn(tokens, 16)
    results = []
    for ours in (True, False):
        own = [tensor.clone().requires_grad_() for tensor in (x, a, b)]
        if ours:
            output = grouped_lora(own[0], weight, own[1], own[2], ends_of(counts), 0.5)
        else:
            output = one_by_one(own[0], weight, own[1], own[2], counts, 0.5)
        output.backward(upstream)
        results.append([output.detach(), *(tensor.grad for tensor in own)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_frozen_input_gets_no_gradient() -> None:
    from rl_actors.trainer.grouped_gemm import grouped_lora

    a, b = torch.randn(2, 8, 16, requires_grad=True), torch.randn(2, 16, 8, requires_grad=True)
    x = torch.randn(6, 16)
    grouped_lora(x, torch.randn(2, 16, 16), a, b, ends_of([2, 4]), 1.0).sum().backward()
    assert x.grad is None
    assert a.grad.abs().sum() > 0 and b.grad.abs().sum() > 0


KERNEL = """
import torch
from rl_actors.trainer.low_rank_add import launch

torch.manual_seed(0)
for counts, rank, width in (([0, 70, 3, 64, 0], 8, 200), ([3, 65], 32, 128)):
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    output, low = torch.randn(sum(counts), width), torch.randn(sum(counts), rank)
    factors = torch.randn(len(counts), width, rank).transpose(1, 2)
    parts = [part @ factors[expert] for expert, part in enumerate(low.split(counts))]
    wanted = output + torch.cat(parts)
    launch(output, low, factors, ends)
    torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)
"""


def test_kernel_adds_the_product_of_each_expert() -> None:
    pytest.importorskip("triton")
    result = subprocess.run(
        [sys.executable, "-c", KERNEL], env=environment(), capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr


def environment() -> dict[str, str]:
    import os

    return {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
