"""A checkpoint's adapters as a PEFT folder, streamed name by name.

Linears get their A and their rows of B. The experts of transformers 5 are two fused parameters,
`mlp.experts.gate_up_proj` [experts, 2 * ffn, hidden] and `down_proj` [experts, hidden, ffn]; PEFT adapts them with
`target_parameters` and one pair of matrices for all experts of a layer (`peft.tuners.lora.ParamWrapper`, PEFT 0.21):

    lora_A [experts * r, in], row e * r + k      lora_B [out, experts * r], column k * experts + e

which holds one adapter for each expert, exactly. `down_proj` is the outer wrapper (`experts.lora_A`) and `gate_up_proj`
the inner one (`experts.base_layer.lora_A`). vLLM reads the same names. Values are cast to the model's type, once.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_actors.errors import CheckpointError
from rl_actors.trainer.hf_adapters import HFLinear, hf_linears
from rl_actors.trainer.safetensors_stream import SafetensorsWriter
from rl_actors.trainer.shard_files import ShardReader, TrainerState

FUSED = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}


@dataclass(frozen=True)
class _Entry:
    """One pair of PEFT tensors.

    Attributes:
        key: PEFT's name without `.lora_A.weight`.
        target: the module or parameter as adapter_config.json names it, in full.
        adapters: one adapter, or one for each expert (None: that expert has none).
        a_shape, b_shape: of the PEFT tensors.
    """

    key: str
    target: str
    adapters: tuple[str | None, ...]
    linear: HFLinear | None
    a_shape: tuple[int, int]
    b_shape: tuple[int, int]

    def a(self, reader: ShardReader) -> torch.Tensor:
        if self.linear:
            return reader.full(str(self.adapters[0]), "A")
        return torch.cat([self._of_expert(reader, name, "A") for name in self.adapters])

    def b(self, reader: ShardReader) -> torch.Tensor:
        if self.linear:
            return self.linear.of(reader.full(str(self.adapters[0]), "B"))
        stacked = torch.stack([self._of_expert(reader, name, "B") for name in self.adapters])
        return stacked.view(len(self.adapters), -1).t().reshape(self.b_shape)

    def _of_expert(self, reader: ShardReader, name: str | None, part: Any) -> torch.Tensor:
        if name is not None:
            return reader.full(name, part)
        rank = self.a_shape[0] // len(self.adapters)
        return torch.zeros((rank, self.a_shape[1]) if part == "A" else (self.b_shape[0], rank))


def obstacle(state: TrainerState) -> str | None:
    """Why PEFT cannot hold these adapters, or None if it can."""
    dense = [name for name in state.adapters if ".mlp.linear_fc" in name]
    if state.model.is_moe and dense:
        return (
            f"PEFT reads targets such as those of {dense[0]} as experts when a model has both dense and expert layers; "
            "export the merged model instead (--format merged-hf)"
        )
    return None


def write(reader: ShardReader, folder: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Write adapter_config.json and adapter_model.safetensors into `folder`.

    Args:
        progress: called with the tensors written and the tensors in all.

    Raises:
        CheckpointError: PEFT cannot hold these adapters, or the checkpoint is damaged.
    """
    state = reader.state
    if reason := obstacle(state):
        raise CheckpointError(reason)
    folder.mkdir(parents=True, exist_ok=True)
    entries = list(_entries(state))
    (folder / "adapter_config.json").write_text(json.dumps(_config(state, entries), indent=2), encoding="utf-8")
    dtype = getattr(torch, state.dtype)
    layout = {}
    for entry in entries:
        layout[f"{entry.key}.lora_A.weight"] = (dtype, entry.a_shape)
        layout[f"{entry.key}.lora_B.weight"] = (dtype, entry.b_shape)
    with SafetensorsWriter(folder / "adapter_model.safetensors", layout) as file:
        for index, entry in enumerate(entries):
            file.write(f"{entry.key}.lora_A.weight", entry.a(reader))
            file.write(f"{entry.key}.lora_B.weight", entry.b(reader))
            progress(2 * (index + 1), len(layout))


def _entries(state: TrainerState) -> Iterator[_Entry]:
    by_block: dict[str, dict[str, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    for name, shapes in state.adapters.items():
        if ".experts." in name and ".shared_experts." not in name:
            _, layer, _, _, expert, kind = name.split(".")
            by_block[f"model.layers.{layer}.mlp.experts"][kind][int(expert)] = name
            continue
        (rank, width), (out, _) = shapes["A"], shapes["B"]
        for linear in hf_linears(name, out, state.model):
            rows = sum(stop - start for start, stop in linear.rows)
            yield _Entry(
                f"base_model.model.{linear.module}", linear.module, (name,), linear, (rank, width), (rows, rank)
            )
    for block, kinds in by_block.items():
        for kind, names in sorted(kinds.items()):
            experts = state.model.experts
            (rank, width), (out, _) = (state.adapters[next(iter(names.values()))][part] for part in "AB")
            inner = kind == "linear_fc1" and "linear_fc2" in kinds
            yield _Entry(
                f"base_model.model.{block}" + (".base_layer" if inner else ""),
                f"{block}.{FUSED[kind]}",
                tuple(names.get(expert) for expert in range(experts)),
                None,
                (experts * rank, width),
                (out, experts * rank),
            )


def _config(state: TrainerState, entries: list[_Entry]) -> dict[str, Any]:
    """adapter_config.json: short names where all layers are adapted alike, full ones otherwise."""
    modules = [entry.target for entry in entries if entry.linear]
    parameters = [entry for entry in entries if not entry.linear]
    expert_ranks = {entry.a_shape[0] // len(entry.adapters) for entry in parameters}
    rank_pattern, alpha_pattern = {}, {}
    if expert_ranks - {state.lora.rank}:  # lora.normalize_moe_lora
        for suffix in _short([entry.target for entry in parameters], state):
            rank_pattern[suffix] = next(iter(expert_ranks))
            alpha_pattern[suffix] = state.lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": state.base,
        "r": state.lora.rank,
        "lora_alpha": state.lora.alpha,
        "lora_dropout": 0.0,  # PEFT has none on parameters, and none is wanted for inference
        "bias": "none",
        "inference_mode": True,
        "target_modules": _short(modules, state),
        "target_parameters": _short([entry.target for entry in parameters], state) or None,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
    }


def _short(targets: list[str], state: TrainerState) -> list[str]:
    """Names without their layer, if every layer has them; PEFT matches by suffix."""
    suffixes: dict[str, int] = defaultdict(int)
    for target in targets:
        suffixes[target.split(".", 3)[3]] += 1
    if all(count == state.model.num_layers for count in suffixes.values()):
        return sorted(suffix if "experts" in suffix else suffix.rpartition(".")[2] for suffix in suffixes)
    return sorted(targets)
