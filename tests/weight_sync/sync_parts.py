"""The real parts of a sync as actors: four Megatron ranks that change layout, and a vLLM process with two models."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from placement.layout import MegatronLayout
from rl_actors.config import RunConfig
from rl_actors.rollout.engine import RolloutEngine
from rl_actors.trainer.worker import MegatronWorker


class Rank(MegatronWorker):
    """A trainer rank that can be built again in another layout, without importing Megatron again."""

    fault = ""

    def at_next_send(self, fault: str) -> None:
        """ "raise" or "die" once, while the others send and receive."""
        self.fault = fault

    def weights(self, method: str, *arguments: Any) -> Any:
        if method == "send" and self.fault:
            fault, self.fault = self.fault, ""
            if fault == "die":
                os.kill(os.getpid(), 9)
            raise RuntimeError("a fault made by the test")
        return super().weights(method, *arguments)

    def rebuild(self, config: RunConfig) -> None:
        from rl_actors.trainer.model import init_model_parallel

        self.config, self.layout = config, MegatronLayout.from_config(config.trainer)
        init_model_parallel(self.layout, config.timeouts.step_s)
        self.build()
        self._sender = None

    def full_adapters(self) -> dict[str, tuple[np.ndarray, np.ndarray, float]]:
        """Whole A and B of this rank's adapters, gathered over tensor parallelism by the trainer's own code."""
        full = {adapter.name: (*adapter.full(), adapter.scale) for adapter in self.model.adapters}
        return {name: (a.numpy(), b.numpy(), float(scale)) for name, (a, b, scale) in full.items()}

    def base_digest(self) -> str:
        digest = hashlib.sha256()
        for chunk in self.model.chunks:
            for name, parameter in chunk.named_parameters():
                if ".adapter." not in name:
                    digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()


class Engines:
    """One process, since importing vLLM takes long, with one engine for each model; calls go to the one in use."""

    def __init__(self, configs: dict[str, RunConfig]) -> None:
        self._configs = configs
        self._engines: dict[str, RolloutEngine] = {}
        self._in_use = ""

    async def use(self, name: str) -> None:
        """A fresh engine, holding the base model, paused."""
        if old := self._engines.pop(self._in_use, None):
            await old.stop()
        self._in_use = name
        self._engines[name] = RolloutEngine(f"engine-{name}", self._configs[name], "cpu")
        await self._engines[name].start()
        await self.pause()

    @property
    def _engine(self) -> RolloutEngine:
        return self._engines[self._in_use]

    async def pause(self) -> None:
        await self._engine.pause()

    async def resume(self, version: int | None = None) -> None:
        await self._engine.resume(version)

    async def apply_model(self, function: Any, *args: Any) -> list[Any]:
        return await self._engine.apply_model(function, *args)

    async def generate(self, *args: Any) -> Any:
        return await self._engine.generate(*args)

    async def health(self) -> dict[str, Any]:
        return await self._engine.health()


def effective_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What the engine's linears compute with, by Hugging Face name: their output for unit vectors.

    The kernels' own packed copies cannot be read; this also shows that the kernels use the new values.
    """
    weights: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        path, _, leaf = name.rpartition(".")
        if leaf in ("qkv_proj", "gate_up_proj", "o_proj", "down_proj"):
            weight = module.quant_method.apply(module, torch.eye(module.input_size)).t().contiguous()
            parts = {"qkv_proj": "qkv", "gate_up_proj": ("gate", "up")}.get(leaf)
            if parts is None:
                weights[f"{name}.weight"] = weight
            else:
                pieces = weight.split(module.output_sizes)
                weights |= {f"{path}.{part}_proj.weight": w.clone() for part, w in zip(parts, pieces, strict=True)}
        elif leaf == "routed_experts" and hasattr(module, "gate_up_linear"):
            for expert in range(module.global_num_experts):
                gate_up = module.gate_up_linear[expert](torch.eye(module.hidden_size)).t()
                down = module.down_linear[expert](torch.eye(gate_up.shape[0] // 2)).t()
                gate, up = gate_up.chunk(2)
                for part, weight in (("gate", gate), ("up", up), ("down", down)):
                    weights[f"{path}.{expert}.{part}_proj.weight"] = weight.clone()
    return weights


def spoil_a_norm(model: torch.nn.Module) -> None:
    """Change one element of a weight that no sync would repair."""
    model.model.layers[1].self_attn.k_norm.weight.data[3] += 1e-6


def drop_norms(model: torch.nn.Module) -> None:
    """What an engine that dropped its weights holds where no adapter is."""
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.zero_()


def beyond_the_rank(model: torch.nn.Module, rank: int) -> float:
    """The largest value in those rows of A and columns of B of the slot that the adapter does not have."""
    from rl_actors.weight_sync.lora_slot import slot_of

    rest = [
        tensor[..., rank:, :] if "_a_" in name else tensor[..., rank:]
        for one in slot_of(model)
        for name, tensor in one.tensors.items()
    ]
    assert rest and all(tensor.numel() for tensor in rest)
    return max(float(tensor.abs().max()) for tensor in rest)


def merged_by_hand(
    folder: Path,
    adapters: dict[str, tuple[np.ndarray, np.ndarray, float]],
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> dict[str, torch.Tensor]:
    """W + scale * B @ A of each adapted Hugging Face tensor, in float64, from the files of the base model."""
    from safetensors.torch import load_file

    base = {key: value.double() for path in folder.glob("*.safetensors") for key, value in load_file(path).items()}
    merged = {}
    for name, (a, b, scale) in adapters.items():
        change = torch.from_numpy(scale * b.astype(np.float64) @ a.astype(np.float64))
        prefix, _, linear = f"model.{name}".rpartition(".")
        prefix = prefix.replace("self_attention", "self_attn")
        if linear == "linear_qkv":
            groups = change.view(kv_heads, heads // kv_heads + 2, head_dim, -1)
            parts = {"q_proj": groups[:, :-2], "k_proj": groups[:, -2], "v_proj": groups[:, -1]}
        elif linear == "linear_fc1":
            parts = dict(zip(("gate_proj", "up_proj"), change.chunk(2), strict=True))
        else:
            parts = {"o_proj" if linear == "linear_proj" else "down_proj": change}
        for part, delta in parts.items():
            key = f"{prefix}.{part}.weight"
            merged[key] = (base[key] + delta.reshape(base[key].shape)).float()
    return merged
