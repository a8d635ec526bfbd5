"""From a Hugging Face folder to this rank's model chunks: distributed groups, settings, weights, adapters, DDP.

Megatron-Bridge reads the model and builds it; this file only chooses the settings. The same functions serve GPU
(Transformer Engine, grouped experts, packed sequences) and CPU (Megatron's local layers, one expert after the other,
padded rows); the difference is `_device_settings`. Invariant: base weights are frozen, adapters exist before DDP
sees the model, and step 0 equals the base.
"""

from __future__ import annotations

import datetime
import logging
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from placement.layout import MegatronLayout
from placement.model_shape import ModelShape, layer_cut
from rl_actors.config import ModelConfig, TrainerConfig
from rl_actors.errors import ConfigError
from rl_actors.lora_config import LoraConfig

Device = Literal["cpu", "gpu"]


@dataclass(frozen=True)
class TrainerModel:
    """What one rank holds.

    Attributes:
        chunks: Megatron DDP around this rank's part of the model; one chunk (no interleaved pipeline).
        config: Bridge's provider, which is Megatron's TransformerConfig.
        bridge: Bridge's AutoBridge of the Hugging Face folder (its conversion tasks give parameter names).
        adapters: `lora.AdapterShard` of every adapter on this rank.
        layout, shape: of the trainer and of the whole model.
    """

    chunks: list[Any]
    config: Any
    bridge: Any
    adapters: list[Any]
    layout: MegatronLayout
    shape: ModelShape
    device: Device

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu") if self.device == "cpu" else torch.device("cuda", torch.cuda.current_device())


def prepare_process(device: Device, threads: int = 1) -> None:
    """Before anything imports Megatron: on CPU its stand-ins, and torch's thread count."""
    _quieten()
    if device == "cpu":
        from rl_actors.trainer import cpu

        torch.set_num_threads(threads)
        cpu.install()


def _quieten() -> None:
    """Bridge logs a traceback for each optional package it does not find; Megatron warns of each fusion that is off."""
    logging.getLogger("megatron.bridge.utils.import_utils").addFilter(lambda record: record.levelno >= logging.ERROR)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\.")


def init_distributed(
    rank: int, layout: MegatronLayout, address: str, port: int, device: Device, timeout_s: float
) -> None:
    """Join torch's process group (gloo on CPU, NCCL on GPU) and make Megatron's groups.

    A rank that waits longer than `timeout_s` for another one in a collective fails instead of hanging.
    """
    backend = "gloo" if device == "cpu" else "nccl"
    if not dist.is_initialized():
        dist.init_process_group(
            backend,
            init_method=f"tcp://{address}:{port}",
            rank=rank,
            world_size=layout.world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
    init_model_parallel(layout, timeout_s)


def init_model_parallel(layout: MegatronLayout, timeout_s: float) -> None:
    """Make Megatron's groups for a layout, in place of those of an earlier one."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
        create_gloo_process_groups=False,
    )


def build_model(
    model: ModelConfig, layout: MegatronLayout, trainer: TrainerConfig, lora: LoraConfig, seed: int, device: Device
) -> TrainerModel:
    """Build this rank's chunks with base weights and adapters. Collective; the groups must exist.

    Raises:
        ConfigError: the layout cannot cut the model, a LoRA target matches nothing, or LoRA's rank is not divisible.
    """
    from megatron.core import tensor_parallel

    from rl_actors.trainer import lora as adapters
    from rl_actors.trainer.grouped_lora import stack_weights
    from rl_actors.trainer.random_weights import fill
    from rl_actors.trainer.variants import make_lora

    shape = ModelShape.from_folder(model.path, model.layers)
    layout.check_model(shape)
    _check_support(layout, lora, device)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)

    bridge, provider = _read_folder(model)
    _settings(provider, shape, layout, trainer, getattr(torch, model.dtype))
    _device_settings(provider, device)
    provider.finalize()

    peft = make_lora(lora)

    def adapt(chunks: list[nn.Module]) -> list[nn.Module]:
        adapters.check_targets(lora, chunks)
        adapted = [peft.apply(chunk) for chunk in chunks]
        for chunk in adapted:
            _check_output_layer(chunk)
            _require_grad_of_first_input(chunk, trainer.recompute, layout)
        return adapted

    provider.register_pre_wrap_hook(adapt)
    chunks = provider.provide_distributed_model(ddp_config=_ddp_config(layout), wrap_with_ddp=True)
    stack_weights(chunks)
    shards = adapters.find_adapters(chunks)
    built = TrainerModel(chunks, provider, bridge, shards, layout, shape, device)
    if model.random_weights:
        fill(built, seed)
    adapters.initialize(shards, lora, seed)  # DoRA starts from the norms of the base weights
    return built


def _read_folder(model: ModelConfig) -> tuple[Any, Any]:
    """Bridge's AutoBridge, and the provider that builds the model with the folder's weights or with none yet."""
    from megatron.bridge import AutoBridge
    from transformers import AutoConfig

    if not model.random_weights:
        bridge = AutoBridge.from_hf_pretrained(str(Path(model.path)))
        return bridge, bridge.to_megatron_provider(load_weights=True)
    bridge = AutoBridge.from_hf_config(AutoConfig.from_pretrained(model.path, **layer_cut(model.path, model.layers)))
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.perform_initialization = False  # `random_weights.fill` does it, alike in every layout
    return bridge, provider


def _check_support(layout: MegatronLayout, lora: LoraConfig, device: Device) -> None:
    if lora.rank % layout.tp:
        raise ConfigError(
            f"lora.rank = {lora.rank} is not a multiple of trainer.tp = {layout.tp}: adapters are split over TP ranks"
        )
    if device == "cpu" and lora.share_expert_adapters:
        raise ConfigError(
            "lora.share_expert_adapters needs GPUs: on CPU each expert is a module with its own adapter; leave it off"
        )
    if device == "cpu" and layout.cp > 1:
        raise ConfigError(
            f"trainer.cp = {layout.cp} needs GPUs: Megatron's attention for CPU has no context parallelism; "
            "use trainer.cp = 1"
        )


def _settings(
    provider: Any, shape: ModelShape, layout: MegatronLayout, trainer: TrainerConfig, dtype: torch.dtype
) -> None:
    """What a layout, a type and RL with a frozen base ask for, on any device."""
    provider.tensor_model_parallel_size = layout.tp
    provider.pipeline_model_parallel_size = layout.pp
    provider.context_parallel_size = layout.cp
    provider.expert_model_parallel_size = layout.ep
    provider.expert_tensor_parallel_size = layout.etp
    provider.sequence_parallel = layout.tp > 1  # MoE with TP is wrong without it
    provider.variable_seq_lengths = layout.pp > 1  # micro-batches differ in length; stages must tell each other
    provider.moe_token_dispatcher_type = "alltoall"  # Core's default refuses variable lengths, on dense models too

    provider.params_dtype = provider.pipeline_dtype = provider.autocast_dtype = dtype
    provider.bf16, provider.fp16 = dtype == torch.bfloat16, False
    provider.attention_softmax_in_fp32 = True
    provider.should_pad_vocab = shape.vocab % layout.tp != 0
    provider.make_vocab_size_divisible_by = 1

    provider.attention_dropout = provider.hidden_dropout = 0.0
    provider.calculate_per_token_loss = True  # no hidden division: loss weights hold the whole normalisation
    provider.gradient_accumulation_fusion = False  # needs APEX, and lets shared adapters drift across EP ranks
    if shape.is_moe:
        provider.moe_router_load_balancing_type = "none"  # the router is frozen
        provider.moe_aux_loss_coeff = 0.0
        provider.moe_router_dtype = "fp32"
        provider.moe_shared_expert_overlap = False  # Bridge's LoRA is wrong with it

    if trainer.recompute == "full":
        provider.recompute_granularity, provider.recompute_method = "full", "uniform"
        provider.recompute_num_layers = 1
    elif trainer.recompute == "selective":
        provider.recompute_granularity = "selective"


def _device_settings(provider: Any, device: Device) -> None:
    """GPU: Transformer Engine layers, grouped experts, fusions. CPU: Megatron's own layers, nothing fused."""
    if device == "gpu":
        provider.apply_rope_fusion = True  # without it packed sequences are rotated one after the other
        provider.moe_grouped_gemm = provider.num_moe_experts is not None
        provider.moe_permute_fusion = provider.num_moe_experts is not None
        return
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from megatron.core.transformer.enums import AttnBackend

    provider.transformer_layer_spec = local_layer_spec
    provider.attention_backend = AttnBackend.local
    for fusion in (
        "masked_softmax_fusion",
        "bias_dropout_fusion",
        "bias_activation_fusion",
        "apply_rope_fusion",
        "cross_entropy_loss_fusion",
        "persist_layer_norm",
        "moe_permute_fusion",
        "moe_grouped_gemm",
    ):
        setattr(provider, fusion, False)


def _ddp_config(layout: MegatronLayout) -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig

    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=use_distributed_optimizer(layout),
    )


def use_distributed_optimizer(layout: MegatronLayout) -> bool:
    """Optimizer state is split over data-parallel ranks where there are any."""
    return layout.dp > 1


def _check_output_layer(chunk: Any) -> None:
    from megatron.bridge.peft.adapter_wrapper import AdapterWrapper

    if isinstance(getattr(chunk, "output_layer", None), AdapterWrapper):
        raise ConfigError(
            "lora.targets reach the output layer, which stays frozen: its gradient would need the logits of all "
            "tokens; add output_layer to lora.exclude"
        )


def _require_grad_of_first_input(chunk: Any, recompute: str, layout: MegatronLayout) -> None:
    """Make the frozen embedding's output require grad where autograd would not reach the adapters otherwise.

    Full recompute wraps layers in a checkpoint whose backward runs only if its input requires grad; without it the
    adapters of the first stage get zero gradients. Bridge 0.6.2 has a patch for this, which it skips when a new model
    reuses the address of an old one, and which only warns when it fails. With a pipeline, a first stage without
    adapters would send an output that has no backward. Later stages receive activations that require grad.
    """
    if not getattr(chunk, "pre_process", False) or (recompute != "full" and layout.pp == 1):
        return

    def require_grad(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output

    chunk.embedding.register_forward_hook(require_grad)
