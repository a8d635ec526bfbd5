"""Does it fit? Bytes on one GPU of the trainer and of an engine, added up from sizes alone.

Invariant: every figure follows from the model's shape and the configuration; nothing is measured here, and what is
only roughly known is rounded up, so "fits" can be trusted more than "short by a little".

One constant comes from a measurement on one H200 with Qwen3-30B-A3B: an engine at 0.9 of the GPU kept 725k tokens of
KV cache, which leaves 2.5 GiB for activations and CUDA graphs.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from placement.layout import EngineLayout, MegatronLayout
from placement.model_shape import ModelShape
from rl_actors.config import RolloutConfig, RunConfig
from rl_actors.lora_config import FUSED_PARTS, LoraConfig
from rl_actors.weight_sync.slot_rank import slot_rank

GIB = 2**30
MIB = 2**20
CUDA_OVERHEAD_BYTES = 2 * GIB
"""CUDA context, NCCL buffers and what the allocator cannot use, per process."""
ENGINE_ACTIVATION_BYTES = int(2.5 * GIB)
LOGIT_CHUNK_BYTES = 3 * 512 * 2**20
"""At work while log-probabilities are computed: the logits of one chunk of tokens (`rl_actors.trainer.logprobs`)."""
OPTIMIZER_BYTES = 12
"""Per trained parameter: the float32 master copy and Adam's two moments, shared out over data parallel ranks."""


FIXED = ("weights", "activations and CUDA graphs", "adapter slot")
"""What an engine worker holds besides its KV cache, out of its share of the GPU."""
WORKING = ("activations kept", "log-probabilities", "backward of one layer")
"""What a trainer rank holds only while it works; a colocated engine may use it at other times."""


@dataclass(frozen=True)
class Memory:
    """What one GPU of one role needs.

    Attributes:
        role: "trainer rank" or "engine worker".
        items: bytes by what they are for.
    """

    role: str
    items: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.items.values())


@dataclass(frozen=True)
class MemoryEstimate:
    """The verdict for a run on GPUs of one size.

    Attributes:
        gpu_bytes: memory of one GPU.
        trainer, engine: needs of one GPU each; on a colocated plan both are on the same one.
        kv_tokens: tokens of KV cache that one engine has room for; 0 if even its weights do not fit.
        shortages: one sentence for each thing that does not fit.
    """

    gpu_bytes: int
    trainer: Memory
    engine: Memory
    kv_tokens: int
    shortages: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.shortages

    @property
    def verdict(self) -> str:
        size = f"GPUs of {self.gpu_bytes / GIB:g} GiB"
        return "\n  - ".join([f"does not fit on {size}:", *self.shortages]) if self.shortages else f"fits on {size}"

    def table(self) -> str:
        """Both roles item by item in GiB."""
        lines = []
        for memory in (self.trainer, self.engine):
            lines.append(f"{memory.role:<34} {'GiB':>8}")
            lines += [f"  {name:<32} {size / GIB:>8.2f}" for name, size in memory.items.items()]
            lines.append(f"  {f'total (a GPU has {self.gpu_bytes / GIB:.1f})':<32} {memory.total / GIB:>8.2f}")
        return "\n".join([*lines, f"KV cache: {self.kv_tokens} tokens per engine"])


def estimate_memory(config: RunConfig, model: ModelShape, gpu_gib: float) -> MemoryEstimate:
    """Add up what the run needs on GPUs with `gpu_gib` GiB each (an H100 has 79, an H200 139)."""
    gpu_bytes = int(gpu_gib * GIB)
    dtype_bytes = 2 if config.model.dtype == "bfloat16" else 4
    layout, engines = MegatronLayout.from_config(config.trainer), EngineLayout.from_config(config.rollout)
    trainer = max((_trainer_stage(config, model, layout, dtype_bytes, pp) for pp in range(layout.pp)), key=_total)
    slot = slot_parameters(model, engines.tp, config.lora) * dtype_bytes if config.sync.mode == "adapter" else 0
    buffers = config.sync.bucket_mib * MIB
    engine, kv_tokens = _engine(config.rollout, model, engines, dtype_bytes, gpu_bytes, buffers, slot)

    shortages = []
    if trainer.total > gpu_bytes:
        shortages.append(
            f"a trainer rank needs {trainer.total / GIB:.1f} GiB: raise trainer.ep, tp or pp, use "
            "trainer.recompute=full, or lower trainer.micro_batch_tokens"
        )
    if without_cache := _no_room_for_cache(engine, config.rollout, gpu_bytes):
        shortages.append(without_cache)
    elif kv_tokens < config.rollout.max_model_len:
        shortages.append(
            f"an engine has room for {kv_tokens} tokens of KV cache and one sequence may have rollout.max_model_len "
            f"= {config.rollout.max_model_len}: raise rollout.tp or rollout.gpu_memory_utilization"
        )
    both = most_at_once(trainer, engine, config.rollout.sleep)
    if config.placement.colocate and not shortages and both > gpu_bytes:
        shortages.append(
            f"a rank and an engine worker on one GPU need {both / GIB:.1f} GiB: lower rollout.gpu_memory_utilization, "
            "set rollout.kv_cache_gib, or let engines sleep (rollout.sleep)"
        )
    return MemoryEstimate(gpu_bytes, trainer, engine, kv_tokens, tuple(shortages))


def _no_room_for_cache(engine: Memory, rollout: RolloutConfig, gpu_bytes: int) -> str | None:
    fixed = sum(engine.items[name] for name in FIXED if name in engine.items)
    given = gpu_bytes if rollout.kv_cache_gib is not None else int(gpu_bytes * rollout.gpu_memory_utilization)
    if fixed < given:
        return None
    share = "" if rollout.kv_cache_gib is not None else f" ({rollout.gpu_memory_utilization:g} of the GPU)"
    return (
        f"an engine worker needs {fixed / GIB:.1f} GiB before any KV cache and may take {given / GIB:.1f}{share}: "
        "raise rollout.tp"
    )


def most_at_once(trainer: Memory, engine: Memory, sleep: str) -> int:
    """Bytes of a rank and an engine worker on one GPU at the worst moment; `sleep` is `rollout.sleep`."""
    if sleep == "never":
        return trainer.total + engine.total
    given = engine.items["KV cache"] + (engine.items["weights"] if sleep == "weights" else 0)
    working = sum(size for name, size in trainer.items.items() if name in WORKING)
    return trainer.total + engine.total - min(given, working)


def trainer_parameters(model: ModelShape, layout: MegatronLayout, stage: int) -> int:
    """Parameters of the base model that one rank of a pipeline stage holds (norms and router are on every TP rank)."""
    layers = model.num_layers // layout.pp
    sparse = round(layers * model.moe_layers / model.num_layers)
    attention = layers * (model.attention_parameters // layout.tp + model.norm_parameters)
    dense = (layers - sparse) * 3 * model.hidden * model.ffn // layout.tp
    experts = sparse * (
        model.experts // layout.ep * model.expert_parameters // layout.etp + model.experts * model.hidden
    )
    embedding = model.vocab * model.hidden // layout.tp
    first, last = stage == 0, stage == layout.pp - 1
    # A tied output layer is the embedding itself, unless the two are on different stages: then it is a copy.
    copies = first + (last and not (model.tied and first))
    return attention + dense + experts + copies * embedding + (model.hidden if last else 0)


def adapter_parameters(model: ModelShape, layout: MegatronLayout, lora: LoraConfig) -> tuple[int, int]:
    """LoRA parameters that one rank holds: (of attention and dense layers, of experts).

    A target's wildcards are read by their last name, so a pattern that picks some layers counts as all of them.
    """
    layers = model.num_layers // layout.pp
    sparse = round(layers * model.moe_layers / model.num_layers)
    query, key_value = model.heads * model.head_dim, model.kv_heads * model.head_dim

    def pair(name: str, inputs: int, outputs: int, rank: int) -> int:
        wanted = any(fnmatch.fnmatchcase(name, target.rpartition(".")[2]) for target in lora.targets)
        magnitude = outputs if lora.variant == "dora" else 0
        return rank * (inputs + outputs) + magnitude if wanted and name not in lora.exclude else 0

    def fused(name: str, inputs: int, heights: tuple[int, ...], rank: int) -> int:
        if lora.variant != "canonical_lora":
            return pair(name, inputs, sum(heights), rank)
        parts = zip(FUSED_PARTS[name], heights, strict=True)
        return sum(pair(part, inputs, height, rank) for part, height in parts)

    def feed_forward(inner: int, rank: int) -> int:
        return fused("linear_fc1", model.hidden, (inner, inner), rank) + pair("linear_fc2", inner, model.hidden, rank)

    attention = fused("linear_qkv", model.hidden, (query, key_value, key_value), lora.rank)
    attention += pair("linear_proj", query, model.hidden, lora.rank)
    dense = layers * attention + (layers - sparse) * feed_forward(model.ffn, lora.rank)
    adapters_per_layer = 1 if lora.share_expert_adapters else model.experts // layout.ep
    expert_rank = lora.rank // model.topk if lora.normalize_moe_lora and model.is_moe else lora.rank
    return dense // layout.tp, sparse * adapters_per_layer * feed_forward(model.moe_ffn, expert_rank)


def slot_parameters(model: ModelShape, tp: int, lora: LoraConfig) -> int:
    """Elements of the adapter slot of one engine worker: vLLM keeps an A for each of query, key, value, gate and up.

    Every kind of layer counts as adapted. A of a linear split over its output is whole on every worker, and so is B of
    one that is split over its input.
    """
    rank = slot_rank(lora.rank) or lora.rank
    query, key_value = model.heads * model.head_dim, 2 * model.kv_heads * model.head_dim

    def feed_forward(inner: int) -> int:
        return 3 * model.hidden + 3 * inner // tp

    attention = 4 * model.hidden + (2 * query + key_value) // tp
    dense = (model.num_layers - model.moe_layers) * feed_forward(model.ffn)
    experts = model.moe_layers * model.experts * feed_forward(model.moe_ffn) if model.is_moe else 0
    return rank * (model.num_layers * attention + dense + experts)


def kv_bytes_per_token(model: ModelShape, tp: int, dtype_bytes: int = 2) -> int:
    """Keys and values of one token on one worker; with more workers than key-value heads each head is repeated."""
    return 2 * model.num_layers * max(1, model.kv_heads // tp) * model.head_dim * dtype_bytes


def _total(memory: Memory) -> int:
    return memory.total


def _trainer_stage(
    config: RunConfig, model: ModelShape, layout: MegatronLayout, dtype_bytes: int, stage: int
) -> Memory:
    dense, experts = adapter_parameters(model, layout, config.lora)
    # A packed micro-batch is cut over context parallel ranks.
    tokens = max(config.trainer.micro_batch_tokens, config.rollout.max_model_len) // layout.cp
    logprobs = _logprobs(model, layout, tokens, dtype_bytes) if stage == layout.pp - 1 else 0
    kept, working = _activations(config, model, layout, tokens * dtype_bytes, stage)
    items = {
        "frozen base weights": trainer_parameters(model, layout, stage) * dtype_bytes,
        "adapters": (dense + experts) * dtype_bytes,
        "adapter gradients (float32)": (dense + experts) * 4,
        "optimizer state of adapters": OPTIMIZER_BYTES * (-(-dense // layout.dp) + -(-experts // layout.edp)),
        "activations kept": kept,
        # Log-probabilities are done before the first layer's backward pass begins.
        "log-probabilities" if logprobs > working else "backward of one layer": max(logprobs, working),
        "weight sync buffers": 2 * config.sync.bucket_mib * MIB,
        "CUDA and NCCL": CUDA_OVERHEAD_BYTES,
    }
    return Memory("trainer rank", items)


def _logprobs(model: ModelShape, layout: MegatronLayout, tokens: int, dtype_bytes: int) -> int:
    """The logits of one chunk, and of each token its hidden state, chosen and whole, and the derivative by it."""
    return min(LOGIT_CHUNK_BYTES, 12 * tokens * (model.vocab // layout.tp)) + 3 * tokens * model.hidden * dtype_bytes


def _activations(
    config: RunConfig, model: ModelShape, layout: MegatronLayout, token_bytes: int, stage: int
) -> tuple[int, int]:
    """Bytes (kept for the backward pass, at work within one layer); `token_bytes` is one channel of all tokens.

    Kept is each layer's input, and unless recomputed all its inner results, for every micro-batch in flight: the
    1F1B schedule has pp - stage of them. With sequence parallel all of it is cut over TP. Attention is counted as a
    flash kernel (no score matrix), experts as evenly used. At work are the inner results and their gradients.
    """
    heads = (model.heads + 2 * model.kv_heads) * model.head_dim
    attention = 2 * model.hidden + heads + model.heads * model.head_dim
    if model.is_moe:
        feed_forward = 2 * model.hidden + model.topk * (2 * model.hidden + 3 * model.moe_ffn)
    else:
        feed_forward = 2 * model.hidden + 3 * model.ffn
    inner = attention + feed_forward
    per_layer = {"none": inner, "selective": inner - heads, "full": model.hidden}[config.trainer.recompute]
    channels = per_layer * (model.num_layers // layout.pp) * (layout.pp - stage)
    return channels * token_bytes // layout.tp, 2 * inner * token_bytes // layout.tp


def _engine(
    rollout: RolloutConfig,
    model: ModelShape,
    engines: EngineLayout,
    dtype_bytes: int,
    gpu_bytes: int,
    buffer_bytes: int,
    slot_bytes: int,
) -> tuple[Memory, int]:
    weights = model.parameters * dtype_bytes // engines.tp
    fixed = weights + slot_bytes + ENGINE_ACTIVATION_BYTES
    if rollout.kv_cache_gib is not None:
        cache = int(rollout.kv_cache_gib * GIB)
    else:
        cache = max(0, int(gpu_bytes * rollout.gpu_memory_utilization) - fixed)
    room = cache if fixed + cache <= gpu_bytes else 0
    items = {
        "weights": weights,
        "KV cache": cache,
        "activations and CUDA graphs": ENGINE_ACTIVATION_BYTES,
        "weight sync buffers": 2 * buffer_bytes,
    } | ({"adapter slot": slot_bytes} if slot_bytes else {})
    return Memory("engine worker", items), room // kv_bytes_per_token(model, engines.tp, dtype_bytes)
