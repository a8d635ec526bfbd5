"""Megatron's Adam over the adapters: gradients and their norms, clipping, steps.

Megatron makes one optimizer for dense and one for expert parameters, and with data parallelism splits each parameter
over ranks (its state is read by `optimizer_state`). Invariant: norms count every element of every adapter once,
whatever the layout, so clipping scales all layouts by the same number.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import ParamKey, get_megatron_optimizer, get_standard_config_overrides
from torch import nn

from rl_actors.config import OptimizerConfig
from rl_actors.trainer.model import TrainerModel, use_distributed_optimizer

RATIO = "lr_mult"
"""Megatron's name in parameter groups for a factor of the learning rate; 1 by default."""


class AdapterOptimizer:
    """Megatron's optimizer of one rank's adapters. Every method is called on all ranks together."""

    def __init__(self, model: TrainerModel, config: OptimizerConfig) -> None:
        self.model = model
        self.config = config
        dtype = model.config.params_dtype
        # `optimizer_state` and checkpoints look into this one.
        settings = MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.adam_beta1,
            adam_beta2=config.adam_beta2,
            adam_eps=config.adam_eps,
            clip_grad=0.0,  # `clip` does it, with the norm of `gradient_squares`
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=use_distributed_optimizer(model.layout),
        )
        overrides: dict[ParamKey, Any] = get_standard_config_overrides(settings)
        if config.lora_plus_ratio != 1.0:
            overrides[ParamKey(name="*.linear_out.weight")] = {RATIO: config.lora_plus_ratio}
        self.megatron = get_megatron_optimizer(
            settings, model.chunks, config_overrides=overrides, use_gloo_process_groups=False
        )
        self.parts = getattr(self.megatron, "chained_optimizers", [self.megatron])
        # Parameters hold several experts on GPU; each is taken once.
        self.kinds: dict[nn.Parameter, str] = {}
        for adapter in model.adapters:
            self.kinds |= dict.fromkeys((part.parameter for part in adapter.parts()), adapter.kind)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for chunk in self.model.chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    @torch.no_grad()
    def gradient_squares(self) -> dict[str, float]:
        """This rank's part of the squared gradient norm of each adapted layer type; the sum over all ranks is whole.

        Of a gradient that several ranks hold, one counts it.
        """
        squares: dict[str, torch.Tensor] = {}
        for parameter, kind in self.kinds.items():
            gradient = self._owned(parameter, parameter.main_grad)  # type: ignore[attr-defined]
            square = gradient.double().square().sum()
            squares[kind] = squares[kind] + square if kind in squares else square
        return {kind: float(square) for kind, square in squares.items()}

    def clip(self, norm: float) -> None:
        """Scale all gradients so that their global norm is at most `clip_grad` (0 turns clipping off)."""
        limit = self.config.clip_grad
        if limit > 0.0 and norm > limit:
            for chunk in self.model.chunks:
                chunk.scale_gradients(limit / (norm + 1e-6))

    def step(self, lr: float) -> None:
        """One Adam step with the gradients as they are, and back into the adapters.

        Args:
            lr: learning rate of A (and M); that of B is `lora_plus_ratio` times it.
        """
        for group in self.megatron.param_groups:
            group["lr"] = lr * group[RATIO]
        self.megatron.step()

    def reload(self) -> None:
        """Take over adapters that were written from outside: float32 masters follow the parameters."""
        self.megatron.reload_model_params()

    @torch.no_grad()
    def gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        """The reduced gradient of an adapter parameter, whole on this rank, float32. Collective.

        After `step` it is the clipped gradient that the step used.
        """
        where = self._range(parameter)
        full = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        full[where] = parameter.main_grad.flatten()[where]  # type: ignore[attr-defined]
        if self._is_split:
            dist.all_reduce(full, group=self._group(parameter))
        return full.view(parameter.shape)

    # ---- which part of a parameter this rank's optimizer has ----

    @property
    def _is_split(self) -> bool:
        return use_distributed_optimizer(self.model.layout)

    def _group(self, parameter: nn.Parameter) -> Any:
        """The ranks that hold the same parameter."""
        if getattr(parameter, "allreduce", True):
            return parallel_state.get_data_parallel_group(with_context_parallel=True)
        return parallel_state.get_expert_data_parallel_group()

    def _part_of(self, parameter: nn.Parameter) -> Any:
        """The distributed optimizer that has some of the parameter on this rank, or None."""
        return next((part for part in self.parts if parameter in getattr(part, "model_param_gbuf_map", {})), None)

    def _range(self, parameter: nn.Parameter) -> slice:
        """Where in the flattened parameter this rank's state lies; empty if nowhere."""
        if not self._is_split:
            return slice(0, parameter.numel())
        part = self._part_of(parameter)
        if part is None:
            return slice(0, 0)
        buffer, dtype, bucket = part.model_param_gbuf_map[parameter]
        where = part.gbuf_ranges[buffer][dtype][bucket]["param_map"][parameter]["param"]
        return slice(where.start, where.end)

    def _owned(self, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """The part of a reduced gradient that this rank, and no other, counts."""
        if self._is_split:
            return gradient.flatten()[self._range(parameter)]
        first = self._group(parameter).rank() == 0
        return gradient.flatten() if first else gradient.flatten()[:0]
