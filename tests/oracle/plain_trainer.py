"""What the trainer should compute, written plainly: Hugging Face's model in float64, autograd, and torch's AdamW.

No Megatron, no micro-batches, one sequence at a time. Hugging Face's norms and routers compute in float32, so this is
good to about 1e-6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from oracle_tasks import Numbers

from placement.model_shape import ModelShape
from rl_actors.config import RunConfig
from rl_actors.lora_config import FUSED_PARTS
from rl_actors.types import TrainBatch

Tensors = dict[str, torch.Tensor]


def train_plainly(config: RunConfig, adapters: dict[str, np.ndarray], batch: TrainBatch) -> Numbers:
    """The numbers of one update from `adapters`, under the names that `oracle_tasks.measure` has for them."""
    model = PlainModel.load(config)
    leaves = {name: torch.from_numpy(value).double().requires_grad_() for name, value in adapters.items()}

    with torch.no_grad():
        base = model.logprobs(batch, model.weights)
    logprobs = model.logprobs(batch, model.merged(leaves))
    loss = policy_loss(logprobs, base, batch, config)
    loss.backward()
    gradients = {name: leaf.grad.clone() for name, leaf in leaves.items() if leaf.grad is not None}

    settings = config.trainer.optimizer
    norm = torch.nn.utils.clip_grad_norm_(leaves.values(), settings.clip_grad)
    plus = [leaf for name, leaf in leaves.items() if name.endswith(".B")]
    rest = [leaf for name, leaf in leaves.items() if not name.endswith(".B")]
    torch.optim.AdamW(
        [{"params": plus, "lr": settings.lora_plus_ratio * settings.lr}, {"params": rest}],
        lr=settings.lr,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_eps,
        weight_decay=settings.weight_decay,
    ).step()
    with torch.no_grad():
        merged = model.merged(leaves)
        after = model.logprobs(batch, merged)
    return {
        "logprobs": {"adapters off": base, "adapters on": logprobs.detach()},
        "loss": {"loss": float(loss)},
        "gradients": {**gradients, "grad_norm": float(norm)},
        "new adapters": {name: leaf.detach() for name, leaf in leaves.items()},
        "merged weights": merged,
        "merged logprobs": {"adapters on": after, "merged": after},
    }


def policy_loss(logprobs: torch.Tensor, old: torch.Tensor, batch: TrainBatch, config: RunConfig) -> torch.Tensor:
    """Clipped, with truncated importance sampling and k3 to the reference, which is the old policy here."""
    algorithm = config.algorithm
    advantages, sampler, weights = (
        torch.from_numpy(array).double() for array in (batch.advantages, batch.sampler_logprobs, batch.loss_weights)
    )
    ratio = torch.exp(logprobs - old)
    bounded = torch.clamp(ratio, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
    importance = torch.clamp(torch.exp(old - sampler), max=algorithm.tis_cap)
    k3 = 1 / ratio + torch.log(ratio) - 1
    objective = importance * torch.minimum(ratio * advantages, bounded * advantages)
    return (weights * (algorithm.kl_coef * k3 - objective)).sum()


@dataclass(frozen=True)
class PlainModel:
    """A Hugging Face model whose adapted weights can be given.

    Attributes:
        weights: the base weights by the trainer's names and in Megatron's order of rows, float64 [out, in].
    """

    model: Any
    shape: ModelShape
    weights: Tensors
    config: RunConfig

    @classmethod
    def load(cls, config: RunConfig) -> PlainModel:
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(
            config.model.path, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        ).requires_grad_(False)
        shape = ModelShape.from_folder(config.model.path)
        return cls(model, shape, _megatron_weights(model, shape), config)

    def merged(self, leaves: Tensors) -> Tensors:
        """W + scale B A of every adapted weight; with DoRA its rows have the base's lengths plus M."""
        merged = {name: weight + self._change(name, leaves) for name, weight in self.weights.items()}
        if self.config.lora.variant == "dora":
            for name, weight in merged.items():
                lengths = self.weights[name].norm(dim=1, keepdim=True) + leaves[f"{name}.M"]
                # The paper's cheaper gradient: the norm it divides by is taken as constant (section 4.3).
                merged[name] = weight * lengths / weight.norm(dim=1, keepdim=True).detach()
        return merged

    def _change(self, name: str, leaves: Tensors) -> torch.Tensor:
        """scale B A of a weight, or of its parts where each has an adapter of its own."""
        lora, (block, _, linear) = self.config.lora, name.rpartition(".")
        if lora.variant != "canonical_lora" or linear not in FUSED_PARTS:
            a, b = leaves[f"{name}.A"], leaves[f"{name}.B"]
            return lora.alpha / (math.sqrt(len(a)) if lora.scaling == "rslora" else len(a)) * b @ a
        parts = [self._change(f"{block}.{part}", leaves) for part in FUSED_PARTS[linear]]
        if linear == "linear_qkv":
            groups = [part.view(self.shape.kv_heads, -1, self.shape.hidden) for part in parts]
            return torch.cat(groups, dim=1).flatten(0, 1)
        return torch.cat(parts)

    def logprobs(self, batch: TrainBatch, weights: Tensors) -> torch.Tensor:
        """float64 [R], with gradient of `weights`."""
        parameters = _huggingface_weights(weights, self.shape)
        assert parameters.keys() <= dict(self.model.named_parameters()).keys()
        offsets, out = batch.token_offsets, []
        for index, prompt in enumerate(batch.prompt_lengths):
            tokens = torch.from_numpy(batch.tokens[offsets[index] : offsets[index + 1]].astype(np.int64))
            logits = torch.func.functional_call(self.model, parameters, (tokens[None],)).logits[0]
            logits = logits / self.config.rollout.temperature
            chosen = torch.log_softmax(logits[prompt - 1 : -1], dim=-1).gather(1, tokens[prompt:, None])
            out.append(chosen[:, 0])
        return torch.cat(out)


def _megatron_weights(model: Any, shape: ModelShape) -> Tensors:
    """Adapted weights by the trainer's names: query, key, value of each group together; gate over up."""
    weights = {}
    for number, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        groups = [
            part.weight.view(shape.kv_heads, -1, shape.hidden)
            for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        name = f"layers.{number}"
        weights[f"{name}.self_attention.linear_qkv"] = torch.cat(groups, dim=1).flatten(0, 1)
        weights[f"{name}.self_attention.linear_proj"] = attention.o_proj.weight
        if not shape.is_moe:
            weights[f"{name}.mlp.linear_fc1"] = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
            weights[f"{name}.mlp.linear_fc2"] = mlp.down_proj.weight
        for expert in range(shape.experts):
            weights[f"{name}.mlp.experts.{expert}.linear_fc1"] = mlp.experts.gate_up_proj[expert]
            weights[f"{name}.mlp.experts.{expert}.linear_fc2"] = mlp.experts.down_proj[expert]
    return weights


def _huggingface_weights(weights: Tensors, shape: ModelShape) -> Tensors:
    """The same weights by Hugging Face's parameter names."""
    out = {}
    query = shape.heads // shape.kv_heads * shape.head_dim
    for number in range(shape.num_layers):
        name, hf = f"layers.{number}", f"model.layers.{number}"
        groups = weights[f"{name}.self_attention.linear_qkv"].view(shape.kv_heads, -1, shape.hidden)
        parts = groups.split([query, shape.head_dim, shape.head_dim], dim=1)
        for letter, part in zip("qkv", parts, strict=True):
            out[f"{hf}.self_attn.{letter}_proj.weight"] = part.reshape(-1, shape.hidden)
        out[f"{hf}.self_attn.o_proj.weight"] = weights[f"{name}.self_attention.linear_proj"]
        if not shape.is_moe:
            gate, up = weights[f"{name}.mlp.linear_fc1"].chunk(2)
            out[f"{hf}.mlp.gate_proj.weight"], out[f"{hf}.mlp.up_proj.weight"] = gate, up
            out[f"{hf}.mlp.down_proj.weight"] = weights[f"{name}.mlp.linear_fc2"]
            continue
        experts = [f"{name}.mlp.experts.{expert}" for expert in range(shape.experts)]
        out[f"{hf}.mlp.experts.gate_up_proj"] = torch.stack([weights[f"{e}.linear_fc1"] for e in experts])
        out[f"{hf}.mlp.experts.down_proj"] = torch.stack([weights[f"{e}.linear_fc2"] for e in experts])
    return out
