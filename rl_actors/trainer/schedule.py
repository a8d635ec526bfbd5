"""One pass of micro-batches through Megatron's own schedules, with or without backward.

The same code runs without a pipeline and with one; `forward_backward_func` decides. What a micro-batch is worth is the
caller's `score`, which sees response-flat log-probabilities and never the layout. Invariant: gradients that are left in
the DDP buffers are those of the plain sum of the scores' losses over all micro-batches and data-parallel ranks; nothing
is divided by their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region

from rl_actors.trainer.batch import (
    Form,
    MicroBatch,
    context_parallel_part,
    length_multiple,
    make_micro_batch,
    plan_micro_batches,
)
from rl_actors.trainer.logprobs import token_logprobs
from rl_actors.trainer.model import TrainerModel
from rl_actors.types import TrainBatch

Outcome = dict[str, Any]
Score = Callable[[MicroBatch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, Outcome]]
"""(micro-batch, logprobs float32 [R] with gradient, entropy float32 [R]) -> (scalar loss, anything to keep)."""


def local_micro_batches(model: TrainerModel, batch: TrainBatch, token_budget: int) -> list[MicroBatch]:
    """This rank's micro-batches: its data-parallel share, and its context-parallel part of each."""
    layout = model.layout
    form: Form = "padded" if model.device == "cpu" else "packed"
    multiple = length_multiple(layout.tp, layout.cp)
    # The budget is per rank; context parallelism spreads a micro-batch over several.
    budget = token_budget * layout.cp
    plan = plan_micro_batches(batch.lengths, layout.dp, budget, form, multiple, model.shape.forward_flops)
    share = plan[parallel_state.get_data_parallel_rank()]
    cp_rank = parallel_state.get_context_parallel_rank()
    return [
        context_parallel_part(make_micro_batch(batch, indices, form, multiple), cp_rank, layout.cp) for indices in share
    ]


def run_micro_batches(
    model: TrainerModel, micro_batches: list[MicroBatch], score: Score, temperature: float, train: bool
) -> list[Outcome]:
    """Score every micro-batch; with `train`, also run backward and reduce gradients over the layout.

    Returns:
        one outcome for each micro-batch that is not a filler, on ranks of the last pipeline stage; else none.
    """
    for chunk in model.chunks:
        chunk.train(train)
    model.config.finalize_model_grads_func = _finalize
    longest = max(micro_batch.tokens.shape[1] for micro_batch in micro_batches)
    with torch.set_grad_enabled(train):
        outcomes = get_forward_backward_func()(
            forward_step_func=partial(_forward_step, model, score, temperature),
            data_iterator=iter(micro_batches),
            model=model.chunks,
            num_microbatches=len(micro_batches),
            seq_length=longest,
            micro_batch_size=1,
            forward_only=not train,
        )
    return [outcome for outcome in outcomes if outcome is not None]


def _finalize(chunks: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
    """Megatron's gradient reduction without its division by the number of tokens: loss weights hold it already."""
    finalize_model_grads(chunks, None, **kwargs)


def _forward_step(
    model: TrainerModel, score: Score, temperature: float, data: Iterator[MicroBatch], chunk: Any
) -> tuple[Any, Callable[[Any], Any]]:
    micro_batch = next(data)
    device = model.torch_device
    output = chunk(
        torch.from_numpy(micro_batch.tokens).to(device),
        torch.from_numpy(micro_batch.positions).to(device),
        None,  # attention is causal and padding stands at the end, so no mask is needed
        output_processor=partial(_chosen_tokens, model.shape.vocab, temperature, micro_batch),
        **_packed(micro_batch, device),
    )
    return output, partial(_score, score, micro_batch)


def _chosen_tokens(
    vocab_size: int,
    temperature: float,
    micro_batch: MicroBatch,
    *,
    hidden_states: torch.Tensor,
    output_layer: Any,
    output_weight: torch.Tensor | None,
    scale_logits: Callable[[torch.Tensor], torch.Tensor],
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Megatron's `output_processor`, in place of its output layer: (logprobs, entropy), float32 [R].

    `hidden_states` [s, b, H] come from the final norm. Each rank then works on its part of the vocabulary, so gradients
    of hidden states are summed over tensor-parallel ranks on their way back: by Megatron's reduce-scatter where the
    sequence is split over them too, by its all-reduce otherwise.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    if output_layer.sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, group=group)
    else:
        hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=group)
    length, rows = hidden_states.shape[:2]
    where = micro_batch.predictors % length * rows + micro_batch.predictors // length
    chosen_RH = hidden_states.flatten(0, 1).index_select(0, torch.from_numpy(where).to(hidden_states.device))
    return token_logprobs(
        scale_logits(chosen_RH),  # what scales logits scales hidden states as well: the output layer has no bias
        output_layer.weight if output_weight is None else output_weight,
        torch.from_numpy(micro_batch.targets).to(hidden_states.device),
        temperature,
        vocab_size,
        group,
    )


def _packed(micro_batch: MicroBatch, device: torch.device) -> dict[str, Any]:
    if micro_batch.cu_seqlens is None:
        return {}
    cu_seqlens = torch.from_numpy(micro_batch.cu_seqlens).to(device)
    longest = int((micro_batch.cu_seqlens[1:] - micro_batch.cu_seqlens[:-1]).max())
    return {
        "packed_seq_params": PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            cu_seqlens_q_padded=cu_seqlens,
            cu_seqlens_kv_padded=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
    }


def _score(
    score: Score, micro_batch: MicroBatch, output: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, Outcome | None]:
    """Megatron's loss function: (loss, a token count that nobody uses, what to keep)."""
    logprobs, entropy = output
    count = torch.zeros((), dtype=torch.int, device=logprobs.device)
    if len(micro_batch.predictors) == 0:
        # Backward must reach every rank's collectives, with gradients of zero.
        return logprobs.sum(), count, None
    loss, outcome = score(micro_batch, logprobs, entropy)
    return loss, count, outcome
