"""Time and memory of the trainer's forward and backward with LoRA, beside the same model without it.

    python -m jobs.bench.lora_step --json                        # Qwen3-30B-A3B cut to 4 layers, one GPU
    python -m jobs.bench.lora_step --model tiny:moe --tokens 64  # anything, also on CPU

Rows, measured in one process on the same tokens:

    frozen_base          the adapters are off; backward still goes through every layer
    per_expert           one adapter for each expert, by grouped GEMMs (what training uses)
    per_expert_library   the same adapters as Megatron-Bridge computes them
    shared               one adapter for all experts (GPUs only)
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch.distributed as dist

from jobs.cli import local_folder, positive, run
from placement.layout import MegatronLayout
from placement.model_shape import ModelShape
from rl_actors.config import ModelConfig, TrainerConfig
from rl_actors.lora_config import LoraConfig
from rl_actors.preflight import check_rank
from rl_actors.targets import check_targets
from rl_actors.trainer.model import Device, TrainerModel, build_model, init_distributed, prepare_process
from rl_actors.types import TrainBatch


@dataclass(frozen=True)
class Row:
    """One kind of step.

    Attributes:
        seconds: of forward and backward, median of the repeats.
        ratio: to the frozen base's.
        peak_bytes: most memory allocated on the GPU meanwhile, weights and gradients included.
        gradient_difference: of the library's gradients to ours, |library - ours| / |ours| over all adapters.
    """

    name: str
    seconds: float
    ratio: float
    tokens_per_s: float
    peak_bytes: int
    gradient_difference: float | None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shape:qwen3-30b-a3b", help="model folder, shape: or tiny: name")
    parser.add_argument("--layers", type=positive, default=4, help="layers of a shape: model")
    parser.add_argument("--sequences", type=positive, default=16)
    parser.add_argument("--tokens", type=positive, default=1024, help="of each sequence")
    parser.add_argument("--rank", type=positive, default=32)
    parser.add_argument("--recompute", default="full", choices=["none", "selective", "full"])
    parser.add_argument("--repeats", type=positive, default=10)
    parser.add_argument("--profile", action="store_true", help="print the kernels that take longest")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    arguments = parser.parse_args()
    rows = measure(arguments)
    dist.destroy_process_group()
    show(rows, arguments)
    if arguments.json:
        print(json.dumps({"rows": [vars(row) for row in rows]}))
    return 0


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Build the models one after the other and time a step of each."""
    import torch

    device: Device = "gpu" if torch.cuda.is_available() else "cpu"
    layout = MegatronLayout()
    prepare_process(device, threads=2)
    if device == "gpu":
        torch.cuda.set_device(0)
    init_distributed(0, layout, "127.0.0.1", _free_port(), device, timeout_s=600)
    batch: TrainBatch | None = None
    seconds: dict[str, float] = {}
    peaks: dict[str, int] = {}
    gradients: dict[str, torch.Tensor] = {}
    for name, lora, library in _kinds(arguments.rank, device):
        with _as_in_the_library() if library else _unchanged():
            model = _build(arguments, layout, lora, device)
        if batch is None:
            batch = random_batch(arguments.sequences, arguments.tokens, model.shape.vocab)
        step = _step(model, batch, arguments.sequences * arguments.tokens)
        if name == "per_expert":
            from rl_actors.trainer.lora import adapters_off

            with adapters_off(model.chunks):
                seconds["frozen_base"], peaks["frozen_base"] = _time(step, arguments, device, "frozen_base")
        seconds[name], peaks[name] = _time(step, arguments, device, name)
        gradients[name] = _gradients(model, step)
        del model, step
        gc.collect()
        if device == "gpu":
            torch.cuda.empty_cache()
    total = arguments.sequences * arguments.tokens
    return [
        Row(name, value, value / seconds["frozen_base"], total / value, peaks[name], _difference(name, gradients))
        for name, value in seconds.items()
    ]


def _gradients(model: TrainerModel, step: Callable[[], Any]) -> Any:
    """float32 [elements of all adapters] on CPU, at adapters that are not zero."""
    import torch

    from rl_actors.trainer.lora import perturb

    perturb(model.adapters, seed=1, scale=0.02)
    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    step()
    parameters = {id(p): p for one in model.adapters for p in (one.a_parameter, one.b_parameter)}
    return torch.cat([parameter.main_grad.flatten().float().cpu() for parameter in parameters.values()])


def _difference(name: str, gradients: dict[str, Any]) -> float | None:
    if name != "per_expert_library":
        return None
    ours = gradients["per_expert"]
    return float((gradients[name] - ours).norm() / ours.norm())


def _kinds(rank: int, device: Device) -> Iterator[tuple[str, LoraConfig, bool]]:
    lora = LoraConfig(rank=rank, alpha=rank)
    yield "per_expert", lora, False
    if device == "gpu":
        yield "per_expert_library", lora, True
        yield "shared", lora.model_copy(update={"share_expert_adapters": True}), False


def _build(arguments: argparse.Namespace, layout: MegatronLayout, lora: LoraConfig, device: Device) -> TrainerModel:
    random_weights = arguments.model.startswith("shape:")
    config = ModelConfig(
        path=local_folder(arguments.model),
        dtype="bfloat16" if device == "gpu" else "float32",
        random_weights=random_weights,
        layers=arguments.layers if random_weights else None,
    )
    trainer = TrainerConfig(recompute=arguments.recompute)
    shape = ModelShape.from_folder(config.path, config.layers)
    check_rank(lora, check_targets(lora, shape, device), shape)
    return build_model(config, layout, trainer, lora, 0, device)


@contextmanager
def _as_in_the_library() -> Iterator[None]:
    with mock.patch("rl_actors.trainer.lora.use_grouped_gemm", lambda wrapper: wrapper):
        yield


@contextmanager
def _unchanged() -> Iterator[None]:
    yield


def random_batch(sequences: int, tokens: int, vocab: int) -> TrainBatch:
    """Random tokens; all but the first of each sequence count as the response."""
    random = np.random.default_rng(0)
    responses = sequences * (tokens - 1)
    ones = np.ones(responses, dtype=np.float32)
    return TrainBatch(
        tokens=random.integers(0, vocab, sequences * tokens).astype(np.int32),
        prompt_lengths=np.ones(sequences, dtype=np.int32),
        response_lengths=np.full(sequences, tokens - 1, dtype=np.int32),
        sampler_logprobs=-ones,
        advantages=ones,
        loss_weights=ones / responses,
    )


def _step(model: TrainerModel, batch: TrainBatch, budget: int) -> Callable[[], Any]:
    """Forward and backward of the whole batch as one micro-batch, as training does it."""
    import torch

    from rl_actors.trainer.schedule import local_micro_batches, run_micro_batches

    micro_batches = local_micro_batches(model, batch, budget)

    def score(micro_batch: Any, logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        weights = torch.from_numpy(micro_batch.batch.loss_weights[micro_batch.responses]).to(logprobs.device)
        loss = -(logprobs * weights).sum()
        return loss, {"loss": loss.detach()}

    return lambda: run_micro_batches(model, micro_batches, score, temperature=1.0, train=True)


def _time(step: Callable[[], Any], arguments: argparse.Namespace, device: Device, name: str) -> tuple[float, int]:
    """(median seconds, peak bytes) of a step after warm-up."""
    import torch

    def timed() -> float:
        started = time.perf_counter()
        step()
        if device == "gpu":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    for _ in range(2):
        timed()
    if device == "gpu":
        torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(timed() for _ in range(arguments.repeats))
    peak = torch.cuda.max_memory_allocated() if device == "gpu" else 0
    if arguments.profile and device == "gpu":
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            timed()
        print(f"\n{name}: {seconds * 1000:.1f} ms")
        print(profiler.key_averages().table(sort_by="cuda_time_total", row_limit=30, max_name_column_width=90))
    return seconds, peak


def show(rows: list[Row], arguments: argparse.Namespace) -> None:
    """The table for people."""
    from rich.console import Console
    from rich.table import Table

    title = (
        f"{arguments.model}, {arguments.sequences} x {arguments.tokens} tokens, r = {arguments.rank}, "
        f"recompute {arguments.recompute}"
    )
    table = Table(
        "",
        "ms",
        "of frozen base",
        "tokens/s",
        "peak GiB",
        "gradients to ours",
        title=title,
        title_justify="left",
        box=None,
    )
    for row in rows:
        table.add_row(
            row.name,
            f"{row.seconds * 1000:.1f}",
            f"{row.ratio:.2f}x",
            f"{row.tokens_per_s:.0f}",
            f"{row.peak_bytes / 2**30:.1f}" if row.peak_bytes else "-",
            "-" if row.gradient_difference is None else f"{row.gradient_difference:.1e}",
        )
    Console(width=120).print(table)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    run(main)
