"""What is sent in adapter mode: A as it is and scale * B, cast once; experts of one parameter as that parameter."""

from dataclasses import dataclass

import pytest
import torch

from rl_actors.trainer.slices import Slice
from rl_actors.weight_sync.factors import FactorSource, factors_of

WHOLE = Slice(0, 0, 1)


@dataclass(frozen=True)
class Shard:
    """The fields of an adapter shard that its factors are made of, on one rank."""

    name: str
    expert: int | None
    a: torch.Tensor
    b: torch.Tensor
    a_parameter: torch.Tensor
    b_parameter: torch.Tensor
    index: int | None
    scale: float
    a_slice: Slice = WHOLE
    b_slice: Slice = WHOLE


def make_shards() -> list[Shard]:
    """A linear, and two experts (numbers 4 and 5 of the model) that share their parameters."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(4, 6, generator=generator), torch.randn(8, 4, generator=generator)
    stacked_a, stacked_b = torch.randn(2, 4, 6, generator=generator), torch.randn(2, 10, 4, generator=generator)
    linear = Shard("layers.0.self_attention.linear_proj", None, a, b, a, b, None, 2.0)
    name = "layers.0.mlp.experts.{}.linear_fc1"
    return [linear] + [
        Shard(name.format(4 + i), 4 + i, stacked_a[i], stacked_b[i], stacked_a, stacked_b, i, 0.3) for i in range(2)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_factors_are_scaled_in_float32_and_cast_once(dtype):
    linear, *experts = make_shards()
    source = FactorSource([linear, *experts], dtype)
    names = list(source.shards)
    assert len(names) == 4, "two experts of one parameter are sent as one"
    source.gather()
    sent = dict(source.merged(names))
    source.release()
    assert {value.dtype for value in sent.values()} == {dtype}
    for shard in (linear, *experts):
        a, b = factors_of(shard)
        place = slice(None) if shard.index is None else shard.index
        assert torch.equal(sent[a.param][place], shard.a.to(dtype))
        assert torch.equal(sent[b.param][place], (shard.b * torch.tensor(shard.scale)).to(dtype))
