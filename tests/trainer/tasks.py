"""What the tests run on rank processes. Each takes the built worker; results are plain arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
        for part in adapter.parts():
            gradient = adapter.of_parameter(whole[part.parameter])
            out[f"{adapter.name}.{part.name}"] = gather(gradient, part.where, adapter.group).numpy()
    return out


def cut_in_many_ways(
    worker: MegatronWorker, batches: dict[str, TrainBatch], budgets: list[int]
) -> dict[str, list[dict[str, Any]]]:
    """Metrics and gradients of each batch at each token budget, whole and in another order of its sequences.

    The adapters are perturbed and never stepped; old logprobs are the base's, so ratios differ from 1 and clip.
    """
    from rl_actors.trainer.update import update

    worker.perturb_adapters(seed=5, scale=0.1)
    out: dict[str, list[dict[str, Any]]] = {}
    for name, batch in batches.items():
        base = _everyones(worker, batch, adapters=False)
        whole = replace(batch, old_logprobs=base, ref_logprobs=base)
        shuffled = whole.select(np.random.default_rng(0).permutation(len(batch)))
        out[name] = []
        for budget in budgets:
            for order in (whole, shuffled):
                metrics = update(
                    worker.model, worker.optimizer, order, worker.config.algorithm, 0.7, budget, lr=0.0, first=False
                )
                out[name].append({"metrics": metrics, "gradients": gradients(worker)})
    return out


def optimizer_bytes(worker: MegatronWorker, batch: TrainBatch) -> dict[str, int]:
    """Bytes that this rank's optimizer and gradients take after a step, and how many parameters there are."""
    train_once(worker, batch)
    chunks, parts = worker.model.chunks, worker.optimizer.parts
    states = [state for part in parts if not part.is_stub_optimizer for state in part.optimizer.state.values()]
    moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
    mains = [main for part in parts if not part.is_stub_optimizer for main in _mains(part)]
    buffers = [buffer for chunk in chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    return {
        "moments": _bytes(moments),
        "masters": _bytes([main for main in mains if main.untyped_storage().data_ptr() not in own]),
        "gradients": _bytes([buffer.grad_data for buffer in buffers]),
        "adapters": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "base": sum(parameter.numel() for parameter in parameters if not parameter.requires_grad),
        "base_gradients": sum(hasattr(p, "main_grad") or p.grad is not None for p in parameters if not p.requires_grad),
    }


def _mains(part: Any) -> list[torch.Tensor]:
    return [main for group in part.optimizer.param_groups for main in group["params"]]


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def merged_forward(worker: MegatronWorker, batch: TrainBatch) -> dict[str, Any]:
    """Logprobs of perturbed adapters, and of a base that holds what weight sync would send, with adapters off."""
    from rl_actors.weight_sync.merge import Merger

    worker.perturb_adapters(seed=5, scale=0.1)
    adapted, base = _everyones(worker, batch), _everyones(worker, batch, adapters=False)
    bases = {adapter.weight: adapter.base.data for adapter in worker.model.adapters}
    merger = Merger(worker.model.adapters, torch.float32, 1 << 16)
    merger.gather()
    for name, merged in merger.merged(list(bases)):
        bases[name].copy_(merged)
    return {"adapted": adapted, "base": base, "merged": _everyones(worker, batch, adapters=False)}


def grouped_experts(worker: MegatronWorker) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """(found, wanted) of the output and gradients of adapters on grouped experts, one of which has no tokens.

    Wanted is autograd through W + scale * B @ A, scaled to DoRA's lengths, expert by expert.
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from torch import nn

    from rl_actors.trainer.grouped_lora import stack_weights
    from rl_actors.trainer.lora import find_adapters, initialize, perturb
    from rl_actors.trainer.variants import make_lora
    from rl_actors.weight_sync.merge import Merger

    config, chunk = worker.model.config, worker.model.chunks[0].module
    splits, width, rows = [3, 0, 4, 2], config.hidden_size, 2 * config.moe_ffn_hidden_size

    class ColumnParallelGroupedLinear(ColumnParallelLinear):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.config, self.num_gemms, self.input_size, self.output_size = config, len(splits), width, rows
            self.use_bias = False
            for expert in range(len(splits)):
                self.register_parameter(f"weight{expert}", nn.Parameter(torch.randn(rows, width), requires_grad=False))

        def forward(self, x: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, None]:
            weights = [getattr(self, f"weight{expert}") for expert in range(len(m_splits))]
            return torch.cat([part @ w.t() for part, w in zip(x.split(m_splits), weights, strict=True)]), None

    torch.manual_seed(0)
    experts = chunk.decoder.layers[0].mlp.experts
    lora = make_lora(worker.config.lora)
    experts.linear_fc1 = lora.transform(ColumnParallelGroupedLinear(), "linear_fc1", "decoder.layers.0.mlp.experts")
    stack_weights([experts])
    shards = [shard for shard in find_adapters([chunk]) if ".local_experts." not in shard.base_name]
    shards = [shard for shard in shards if shard.expert is not None]
    initialize(shards, worker.config.lora, seed=1)
    x = torch.randn(sum(splits), width)
    out: dict[str, Any] = {"base": (experts.linear_fc1(x, splits)[0], experts.linear_fc1.to_wrap(x, splits)[0])}
    perturb(shards, seed=2, scale=0.1)
    found = experts.linear_fc1(x, splits)[0]
    upstream = torch.randn_like(found)
    (found * upstream).sum().backward()

    merger = Merger(shards, torch.float32, 1 << 20)
    merger.gather()
    sent = {name: merged.clone() for name, merged in merger.merged(list(merger.shards))}
    wanted = []
    for weight, part in zip(sent, x.split(splits), strict=True):
        merged, own = 0, merger.shards[weight]
        leaves = {(s.name, p.name): p.local.detach().clone().requires_grad_() for s in own for p in s.parts()}
        merged = own[0].base
        for shard in own:
            delta = torch.zeros_like(merged)
            runs = [torch.arange(*run) for run in shard.rows or ((0, rows),)]
            delta = delta.index_copy(0, torch.cat(runs), leaves[shard.name, "B"] @ leaves[shard.name, "A"])
            merged = merged + shard.scale * delta
            if shard.magnitude is not None:
                lengths = shard.base.norm(dim=1, keepdim=True) + leaves[shard.name, "M"]
                merged = merged * lengths / merged.norm(dim=1, keepdim=True).detach()
        wanted.append(part @ merged.t())
        (wanted[-1] * upstream.split(splits)[len(wanted) - 1]).sum().backward()
        out[weight] = sent[weight], merged
        if len(part):
            for shard in own:
                for p in shard.parts():
                    leaf = leaves[shard.name, p.name]
                    out[f"{shard.name}.{p.name}"] = shard.of_parameter(p.parameter.grad), leaf.grad
    out["output"] = found, torch.cat(wanted)
    return {name: (a.detach().numpy(), b.detach().numpy()) for name, (a, b) in out.items()}


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


def step_changes(worker: MegatronWorker, batch: TrainBatch) -> dict[str, Any]:
    """What one step from perturbed adapters changed, by global name, and the learning rates of two."""
    from rl_actors.trainer.lora import gather

    def whole() -> dict[str, np.ndarray]:
        found = [(adapter, part) for adapter in worker.model.adapters for part in adapter.parts()]
        return {f"{a.name}.{p.name}": gather(p.local, p.where, a.group).numpy().copy() for a, p in found}

    def rates() -> set[float]:
        return {group["lr"] for group in worker.optimizer.megatron.param_groups}

    worker.perturb_adapters(seed=5, scale=0.1)
    batch = replace(batch, old_logprobs=_everyones(worker, batch))
    before = whole()
    lrs = [worker.update(batch)["lr"]]
    changes, found = {name: after - before[name] for name, after in whole().items()}, [rates()]
    lrs.append(worker.update(batch)["lr"])
    return {"changes": changes, "rates": [*found, rates()], "lrs": lrs}


def adapter_scales(worker: MegatronWorker) -> dict[str, tuple[float, int]]:
    """(scale, rank) by kind."""
    return {adapter.kind: (adapter.scale, adapter.b.shape[-1]) for adapter in worker.model.adapters}


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
        "hidden": [
            name
            for name, module in sys.modules.items()
            if isinstance(module, cpu._Placeholder) or (module is None and name in ("vllm", "flashinfer"))
        ],
    }
