"""What the tests run on rank processes. Each takes the built worker; results are plain arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from rl_actors.errors import TrainingError
from rl_actors.trainer.pool import merge_logprobs
from rl_actors.trainer.worker import MegatronWorker
from rl_actors.types import TrainBatch


def train_once(worker: MegatronWorker, batch: TrainBatch) -> dict[str, Any]:
    """Logprobs with and without adapters, one update, and its gradients by global name."""
    logprobs = _everyones(worker, batch)
    base = _everyones(worker, batch, adapters=False)
    metrics = worker.update(replace(batch, old_logprobs=logprobs, ref_logprobs=base))
    return {"logprobs": logprobs, "base": base, "metrics": metrics, "gradients": gradients(worker)}


def gradients(worker: MegatronWorker) -> dict[str, np.ndarray]:
    """Full gradients of the adapters of this rank, as the last step used them."""
    from rl_actors.trainer.lora import gather

    whole = {parameter: worker.optimizer.gradient(parameter) for parameter in worker.optimizer.kinds}
    out = {}
    for adapter in worker.model.adapters:
        a = adapter.of_parameter(whole[adapter.a_parameter])
        b = adapter.of_parameter(whole[adapter.b_parameter])
        out[f"{adapter.name}.A"] = gather(a, adapter.a_slice, adapter.group).numpy()
        out[f"{adapter.name}.B"] = gather(b, adapter.b_slice, adapter.group).numpy()
    return out


def perturbed(worker: MegatronWorker, batch: TrainBatch) -> dict[str, Any]:
    """Adapters after a perturbation, and the logprobs they give."""
    worker.perturb_adapters(seed=5, scale=0.1)
    factors = {}
    for adapter in worker.model.adapters:
        a, b = adapter.full()
        factors[adapter.name] = (a.numpy().copy(), b.numpy().copy())
    return {"factors": factors, "logprobs": _everyones(worker, batch), "base": _everyones(worker, batch, False)}


def merged_forward(worker: MegatronWorker, batch: TrainBatch) -> dict[str, Any]:
    """Logprobs of perturbed adapters, and of a base that holds `W + scale * B @ A` with adapters off."""
    worker.perturb_adapters(seed=5, scale=0.1)
    adapted = _everyones(worker, batch)
    for adapter in worker.model.adapters:
        a, b = adapter.local_factors()
        adapter.base.data.add_(adapter.scale * b @ a)
    return {"adapted": adapted, "merged": _everyones(worker, batch, adapters=False)}


def recompute_alone(worker: MegatronWorker, batch: TrainBatch, ours: bool) -> Any:
    """One update without Bridge's own patch for recompute, and with or without ours: gradients, or the error."""
    from rl_actors.trainer import model

    with mock.patch("megatron.bridge.peft.base.maybe_enable_recompute_inputs_grad"):
        if ours:
            worker.build()
        else:
            with mock.patch.object(model, "_require_grad_of_first_input"):
                worker.build()
    try:
        return train_once(worker, batch)["gradients"]
    except TrainingError as error:
        return str(error)


def survive_bad_batch(worker: MegatronWorker, batch: TrainBatch) -> dict[str, Any]:
    """An update with a NaN in it, then a good one."""
    logprobs = _everyones(worker, batch)
    good = replace(batch, old_logprobs=logprobs, ref_logprobs=logprobs)
    advantages = batch.advantages.copy()
    advantages[0] = np.nan
    try:
        worker.update(replace(good, advantages=advantages))
        error = ""
    except TrainingError as fault:
        error = str(fault)
    after = _everyones(worker, batch)
    return {
        "error": error,
        "before": logprobs,
        "after": after,
        "steps": worker.steps,
        "loss": worker.update(good)["loss"],
    }


def train_without_signal(worker: MegatronWorker, batch: TrainBatch) -> dict[str, float]:
    """An update whose advantages are all zero."""
    logprobs = _everyones(worker, batch)
    nothing = np.zeros_like(batch.advantages)
    return worker.update(replace(batch, advantages=nothing, old_logprobs=logprobs, ref_logprobs=logprobs))


def adapter_names(worker: MegatronWorker) -> list[str]:
    return [adapter.name for adapter in worker.model.adapters]


def _everyones(worker: MegatronWorker, batch: TrainBatch, adapters: bool = True) -> np.ndarray:
    """float32 [R], the ranks' answers put together on every rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, worker.compute_logprobs(batch, adapters))
    return merge_logprobs(batch, everyone)


def vocab_parallel(
    worker: MegatronWorker, hidden: np.ndarray, weight: np.ndarray, targets: np.ndarray, vocab: int
) -> dict[str, Any]:
    """token_logprobs with this rank's rows of the output layer, and its part of the gradient of a weighted sum."""
    from megatron.core import parallel_state

    from rl_actors.trainer.logprobs import token_logprobs

    group = parallel_state.get_tensor_model_parallel_group()
    rows = torch.from_numpy(weight).chunk(group.size())[group.rank()]
    local = torch.from_numpy(hidden).requires_grad_()
    logprobs, entropy = token_logprobs(local, rows, torch.from_numpy(targets), 0.7, vocab, group, chunk=3)
    (logprobs * torch.arange(1.0, len(targets) + 1)).sum().backward()
    return {"logprobs": logprobs.detach().numpy(), "entropy": entropy.numpy(), "gradient": local.grad.numpy()}


def train_with_whole_logits(worker: MegatronWorker, batch: TrainBatch) -> dict[str, Any]:
    """`train_once`, with log-probabilities by log_softmax of all logits and autograd. For one tensor-parallel rank."""

    def plain(
        hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float, vocab: int, group: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.log_softmax((hidden @ weight.t())[:, :vocab] / temperature, dim=-1)
        entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
        return logprobs.gather(1, targets[:, None])[:, 0], entropy.detach()

    with mock.patch("rl_actors.trainer.schedule.token_logprobs", plain):
        return train_once(worker, batch)


def look_at_stand_ins(worker: MegatronWorker) -> dict[str, Any]:
    """What `rl_actors.trainer.cpu` makes of this process."""
    import sys

    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from rl_actors.trainer import cpu

    zeros = torch.zeros
    cpu.install()
    with torch.device("meta"):
        context = torch.zeros(2).device.type
    torch.manual_seed(1)
    undisturbed = torch.rand(3).tolist()
    torch.manual_seed(1)
    with get_cuda_rng_tracker().fork():
        forked = torch.rand(3).tolist()
    return {
        "literal": torch.zeros(2, device="cuda").cuda().device.type,
        "type": torch.zeros(2).type(),
        "context": context,
        "idempotent": torch.zeros is zeros,
        "forked": forked,
        "undisturbed": torch.rand(3).tolist() == undisturbed,
        "hidden": [name for name in ("vllm", "flashinfer") if name in sys.modules and sys.modules[name] is None],
    }
