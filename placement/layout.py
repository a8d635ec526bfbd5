"""Which part of the model a Megatron rank holds, and whether a model can be cut that way.

Invariant: `MegatronLayout.coords` is Megatron-Core's own rank order "tp-cp-ep-dp-pp": attention and dense layers
see the grid tp-cp-dp-pp, experts see etp-ep-edp-pp, over the same ranks; the first axis changes fastest.

A *rank group* (replica) is one whole copy of the model: `lcm(tp*cp, ep*etp)` consecutive ranks of every pipeline
stage. Pipeline is the slowest axis, so with several replicas the ranks of one group are not consecutive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from placement.model_shape import ModelShape
from rl_actors.errors import ConfigError

if TYPE_CHECKING:
    from rl_actors.config import RolloutConfig, TrainerConfig


@dataclass(frozen=True)
class RankCoords:
    """Where a rank stands on each axis. Dense layers use tp, cp, dp, pp; experts use etp, ep, edp, pp."""

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int
    edp: int


@dataclass(frozen=True)
class MegatronLayout:
    """Sizes of the trainer's parallel axes.

    Attributes:
        tp: tensor parallel ranks of attention and dense layers.
        pp: pipeline stages.
        cp: context parallel ranks.
        ep: expert parallel ranks.
        etp: tensor parallel ranks within one expert.
        replicas: rank groups, each a whole copy of the model.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        for axis in fields(self):
            size = getattr(self, axis.name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigError(f"trainer.{axis.name} = {size!r} is not a whole number of at least 1")

    @classmethod
    def from_config(cls, trainer: TrainerConfig) -> MegatronLayout:
        return cls(tp=trainer.tp, pp=trainer.pp, cp=trainer.cp, ep=trainer.ep, replicas=trainer.replicas)

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage of one rank group."""
        return math.lcm(self.tp * self.cp, self.ep * self.etp)

    @property
    def group_size(self) -> int:
        """Ranks of one rank group."""
        return self.pp * self.stage_size

    @property
    def world_size(self) -> int:
        return self.replicas * self.group_size

    @property
    def dp(self) -> int:
        """Data parallel size of attention and dense layers (EP ranks beyond tp*cp are data parallel there)."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Data parallel size of the experts."""
        return self.world_size // (self.ep * self.etp * self.pp)

    def coords(self, rank: int) -> RankCoords:
        """The coordinates of a global rank.

        Raises:
            IndexError: no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is outside a world of {self.world_size}")
        pp, within = divmod(rank, self.world_size // self.pp)
        return RankCoords(
            tp=within % self.tp,
            cp=within // self.tp % self.cp,
            dp=within // (self.tp * self.cp),
            pp=pp,
            ep=within // self.etp % self.ep,
            etp=within % self.etp,
            edp=within // (self.etp * self.ep),
        )

    def rank_group(self, rank: int) -> int:
        """The replica that a global rank belongs to."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is outside a world of {self.world_size}")
        return rank % (self.world_size // self.pp) // self.stage_size

    def group_ranks(self, replica: int) -> list[int]:
        """The global ranks of one rank group, ascending."""
        stage, first = self.world_size // self.pp, replica * self.stage_size
        return [pp * stage + first + rank for pp in range(self.pp) for rank in range(self.stage_size)]

    def check_model(self, model: ModelShape) -> None:
        """Refuse a layout that cannot cut the model.

        Raises:
            ConfigError: one sentence for each axis that does not fit, all in one message.
        """
        if faults := list(self._faults(model)):
            raise ConfigError("; ".join(faults))

    def _faults(self, model: ModelShape) -> list[str]:
        faults: list[str] = []

        def divides(axis: str, size: int, amount: int, what: str, allowed: int | None = None) -> None:
            if amount % size:
                faults.append(
                    f"trainer.{axis} = {size} does not divide the model's {amount} {what}: "
                    f"use {_choices(allowed or amount, size)}"
                )

        # A key-value head is never shared between ranks: the merge and the sync cut along whole heads.
        heads = math.gcd(model.heads, model.kv_heads)
        divides("tp", self.tp, model.heads, "attention heads", heads)
        if model.heads % self.tp == 0:
            divides("tp", self.tp, model.kv_heads, "key-value heads", heads)
        divides("pp", self.pp, model.num_layers, "layers")
        if model.dense_layers:
            divides("tp", self.tp, model.ffn, "feed-forward channels", math.gcd(model.ffn, heads))
        if not model.is_moe:
            if self.ep > 1:
                faults.append(f"trainer.ep = {self.ep} needs experts and this model is dense: use trainer.ep = 1")
        else:
            divides("ep", self.ep, model.experts, "experts")
            if self.etp > 1:
                # Bridge's expert LoRA is wrong when one expert is cut over ranks (Megatron-Bridge 0.6.2).
                faults.append(
                    f"trainer.etp = {self.etp} is not supported with LoRA on experts: raise trainer.ep instead"
                )
        return faults


@dataclass(frozen=True)
class EngineLayout:
    """vLLM engines: `engines` whole copies of the model with `tp` tensor parallel workers each."""

    engines: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in fields(self):
            size = getattr(self, axis.name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigError(f"rollout.{axis.name} = {size!r} is not a whole number of at least 1")

    @classmethod
    def from_config(cls, rollout: RolloutConfig) -> EngineLayout:
        return cls(engines=rollout.engines, tp=rollout.tp)

    @property
    def workers(self) -> int:
        return self.engines * self.tp

    def check_model(self, model: ModelShape) -> None:
        """Refuse what vLLM cannot cut: heads, and key-value heads that neither divide nor repeat evenly.

        Raises:
            ConfigError: one sentence for each fault, all in one message.
        """
        faults = []
        if model.heads % self.tp:
            faults.append(
                f"rollout.tp = {self.tp} does not divide the model's {model.heads} attention heads: "
                f"use {_choices(model.heads, self.tp)}"
            )
        elif model.kv_heads % self.tp and self.tp % model.kv_heads:
            faults.append(
                f"rollout.tp = {self.tp} neither divides nor is a multiple of the model's {model.kv_heads} "
                f"key-value heads: use {_choices(model.kv_heads, self.tp)}"
            )
        for channels, what in ((model.ffn, "feed-forward"), (model.moe_ffn, "expert")):
            if channels % self.tp:
                faults.append(f"rollout.tp = {self.tp} does not divide the model's {channels} {what} channels")
        if faults:
            raise ConfigError("; ".join(faults))


def _choices(amount: int, wanted: int) -> str:
    """The divisors of `amount` next to `wanted`, as text."""
    divisors = [size for size in range(1, amount + 1) if amount % size == 0]
    below = [size for size in divisors if size <= wanted]
    above = [size for size in divisors if size > wanted]
    return " or ".join(str(size) for size in [*below[-1:], *above[:1]])
