"""Merging is W + scale * B @ A in float32, cast once, whatever the batching; the base is only read."""

from dataclasses import dataclass

import pytest
import torch

from rl_actors.weight_sync.merge import Merger


@dataclass(frozen=True)
class Shard:
    """The fields of an adapter shard that merging reads, on one rank."""

    name: str
    kind: str
    layer: int
    expert: int | None
    base: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    scale: float
    rows: None = None

    @property
    def weight(self) -> str:
        return self.name

    def row_scale(self) -> None:
        return None

    def local_factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a, self.b


def make_shards(dtype: torch.dtype) -> list[Shard]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    shards = []
    for layer in range(2):
        shards.append(Shard(f"{layer}.qkv", "linear_qkv", layer, None, randn(12, 8), randn(4, 8), randn(12, 4), 2.0))
        for kind, out, width in (("experts.linear_fc1", 10, 8), ("experts.linear_fc2", 8, 5)):
            shards += [
                Shard(
                    f"{layer}.{expert}.{kind}",
                    kind,
                    layer,
                    expert,
                    randn(out, width),
                    randn(4, width),
                    randn(out, 4),
                    0.5,
                )
                for expert in range(5)
            ]
    return shards


@pytest.mark.parametrize("scratch_numel", [1, 200, 10**6], ids=["one at a time", "two experts", "all experts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merged_equals_the_formula_and_the_base_is_untouched(dtype, scratch_numel):
    shards = make_shards(dtype)
    before = [shard.base.clone() for shard in shards]
    merger = Merger(shards, dtype, scratch_numel)
    merger.gather()
    seen = []
    for name, merged in merger.merged([shard.name for shard in shards]):
        shard = shards[len(seen)]
        exact = shard.base.double() + shard.scale * shard.b.double() @ shard.a.double()
        assert name == shard.name and merged.dtype == dtype
        # Casting A, B or their product to bfloat16 on the way would be off by far more than one rounding at the end.
        tolerance = 1e-6 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(merged.double(), exact, rtol=tolerance, atol=1e-6)
        seen.append(name)
    assert len(seen) == len(shards)
    assert all(torch.equal(shard.base, old) for shard, old in zip(shards, before, strict=True))
    # Scratch (and the cast copy) of the largest batch: experts that fit, or the largest weight alone.
    largest = max(96, *(size * max(1, min(5, scratch_numel // size)) for size in (80, 40)))
    assert merger.buffer_bytes == largest * (4 if dtype == torch.float32 else 6)


def test_any_subset_in_any_order():
    shards = make_shards(torch.float32)
    merger = Merger(shards, torch.float32, 10**6)
    merger.gather()
    names = [shards[3].name, shards[0].name, shards[9].name, shards[2].name]
    got = {name: merged.clone() for name, merged in merger.merged(names)}
    for shard in shards:
        if shard.name in names:
            torch.testing.assert_close(got[shard.name], shard.base + shard.scale * shard.b @ shard.a)
