"""The loss against a token-by-token oracle in Python floats, exact KL, and what must not depend on the cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rl_actors.algorithms.corrections import truncated_weights
from rl_actors.algorithms.losses import loss_weights, policy_loss
from rl_actors.config import AlgorithmConfig

LENGTHS = np.array([3, 1, 7, 5])
TOKENS = int(LENGTHS.sum())


def _inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    """Far enough apart that clipping and the cap act on some tokens and not on others."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(TOKENS, generator=generator) * scale

    old = normal(1.0) - 3.0
    return {
        "logprobs_R": (old + normal(0.3)).requires_grad_(),
        "old_logprobs_R": old,
        "sampler_logprobs_R": old + normal(0.6),
        "advantages_R": normal(1.0),
        "loss_weights_R": torch.from_numpy(loss_weights(LENGTHS, "token_mean")),
        "ref_logprobs_R": old + normal(0.5),
    }


def _oracle(inputs: dict[str, torch.Tensor], config: AlgorithmConfig) -> float:
    columns = [inputs[name].tolist() for name in inputs]
    total = 0.0
    for new, old, sampler, advantage, weight, ref in zip(*columns, strict=True):
        ratio = math.exp(new - old)
        bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        tis = min(math.exp(old - sampler), config.tis_cap) if config.tis_cap else 1.0
        kl = math.exp(ref - new) - (ref - new) - 1
        total += weight * (-tis * min(ratio * advantage, bounded * advantage) + config.kl_coef * kl)
    return total


CONFIGS = [
    AlgorithmConfig(kl_coef=0.1),
    AlgorithmConfig(clip_low=0.1, clip_high=0.28, tis_cap=1.2),
    AlgorithmConfig(tis_cap=0.0),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_the_loss_and_its_gradient_equal_the_oracle(config):
    """Loss to 1e-6; gradient to the oracle's central differences in float64 to 1e-4."""
    inputs = _inputs()
    loss, _ = policy_loss(**inputs, config=config)
    assert loss.item() == pytest.approx(_oracle(inputs, config), abs=1e-6)
    loss.backward()
    base = inputs["logprobs_R"].detach().double()
    for token in range(TOKENS):
        sides = []
        for step in (1e-6, -1e-6):
            moved = base.clone()
            moved[token] += step
            sides.append(_oracle({**inputs, "logprobs_R": moved}, config))
        slope = (sides[0] - sides[1]) / 2e-6
        assert float(inputs["logprobs_R"].grad[token]) == pytest.approx(slope, abs=1e-4)


def test_metrics_are_means_that_a_person_would_compute():
    inputs, config = _inputs(), AlgorithmConfig(clip_low=0.1, clip_high=0.28, tis_cap=1.2)
    _, metrics = policy_loss(**inputs, config=config)
    rows = list(zip(*(inputs[name].tolist() for name in inputs), strict=True))
    clipped = [
        (math.exp(new - old) > 1.28 and a > 0) or (math.exp(new - old) < 0.9 and a < 0) for new, old, _, a, _, _ in rows
    ]
    tis = [math.exp(old - sampler) for _, old, sampler, *_ in rows]
    gaps = [abs(old - sampler) for _, old, sampler, *_ in rows]
    expected = {
        "clip_fraction": np.mean(clipped),
        "tis_weight": np.mean(np.minimum(tis, 1.2)),
        "tis_capped_fraction": np.mean([weight > 1.2 for weight in tis]),
        "logprob_gap": np.mean(gaps),
        "max/logprob_gap": max(gaps),
        "ratio": np.mean([math.exp(new - old) for new, old, *_ in rows]),
    }
    assert 0 < expected["clip_fraction"] < 1 and 0 < expected["tis_capped_fraction"] < 1
    assert {name: float(metrics[name]) for name in expected} == pytest.approx(expected, rel=1e-5)
    assert not any(value.requires_grad for value in metrics.values())


def test_the_cut_into_micro_batches_does_not_matter():
    inputs, config = _inputs(), CONFIGS[0]
    whole_loss, whole = policy_loss(**inputs, config=config)
    parts = [
        policy_loss(**{name: value[piece] for name, value in inputs.items()}, config=config)
        for piece in (slice(0, 4), slice(4, 4), slice(4, 11), slice(11, None))
    ]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole_loss.item(), abs=1e-6)
    for name, value in whole.items():
        combine = max if name.startswith("max/") else sum
        assert float(combine(metrics[name] for _, metrics in parts)) == pytest.approx(float(value), abs=1e-6), name


def test_on_policy_the_gradient_is_reinforce():
    inputs = _inputs()
    same = inputs["logprobs_R"].detach()
    inputs |= {"old_logprobs_R": same, "sampler_logprobs_R": same, "ref_logprobs_R": None}
    loss, metrics = policy_loss(**inputs, config=AlgorithmConfig())
    loss.backward()
    expected = -inputs["advantages_R"] * inputs["loss_weights_R"]
    torch.testing.assert_close(inputs["logprobs_R"].grad, expected)
    assert float(metrics["clip_fraction"]) == float(metrics["kl_old"]) == 0.0
    assert float(metrics["tis_weight"]) == pytest.approx(1.0)


def test_the_kl_term_is_an_unbiased_kl_to_the_reference():
    """Weighing every token of a vocabulary with the policy's probability gives KL(policy || reference) itself."""
    generator = torch.Generator().manual_seed(1)
    policy, reference = torch.log_softmax(torch.randn(2, 50, generator=generator), dim=-1)
    zeros = torch.zeros(50)
    loss, metrics = policy_loss(
        policy, policy, policy, zeros, policy.exp(), reference, AlgorithmConfig(kl_coef=2.0, tis_cap=0.0)
    )
    exact = float(
        torch.distributions.kl_divergence(*(torch.distributions.Categorical(logits=x) for x in (policy, reference)))
    )
    assert float(metrics["kl_ref"]) == pytest.approx(exact, rel=1e-5)
    assert loss.item() == pytest.approx(2 * exact, rel=1e-5)


def test_far_apart_logprobs_stay_finite():
    inputs = _inputs()
    inputs["old_logprobs_R"] = inputs["old_logprobs_R"] - 200.0
    loss, _ = policy_loss(**inputs, config=CONFIGS[0])
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(inputs["logprobs_R"].grad).all()


def test_a_rank_without_tokens_has_loss_zero_with_a_gradient_path():
    inputs = {name: value[:0] for name, value in _inputs().items()}
    loss, metrics = policy_loss(**inputs, config=CONFIGS[0])
    assert loss.item() == 0.0 and loss.requires_grad
    assert all(float(value) == 0.0 for value in metrics.values())


def test_kl_without_reference_is_refused():
    with pytest.raises(ValueError, match="kl_coef"):
        policy_loss(**{**_inputs(), "ref_logprobs_R": None}, config=CONFIGS[0])


def test_truncated_weights_are_detached_and_capped():
    old = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    sampler = torch.tensor([-1.0, -3.0, -0.5])
    weights, capped = truncated_weights(old, sampler, cap=2.0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, math.exp(-0.5)])
    assert capped.tolist() == [False, True, False]
    assert not weights.requires_grad
    assert truncated_weights(old, sampler, cap=0.0)[0].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_loss_weights_make_a_sum_the_mean(reduction):
    values = np.random.default_rng(0).normal(size=TOKENS)
    sequences = np.split(values, np.cumsum(LENGTHS)[:-1])
    means = {"token_mean": values.mean(), "sequence_mean": np.mean([part.mean() for part in sequences])}
    weights = loss_weights(LENGTHS, reduction)
    assert weights.dtype == np.float32 and weights.shape == (TOKENS,)
    assert float(weights @ values) == pytest.approx(means[reduction], abs=1e-6)
