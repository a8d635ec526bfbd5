"""The configuration of a run: frozen, typed, each field documented under it, defaults that work.

A recipe (jobs/configs/*.yaml) states only what differs. `rl_actors.config_file` reads one.
Sizes that must agree with a model folder are checked in `rl_actors.preflight`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from rl_actors.config_section import Seconds, Section, Text, Threads
from rl_actors.lora_config import LoraConfig
from rl_actors.paths import output_path

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
SyncMode = Literal["merged", "adapter"]


class ModelConfig(Section):
    path: str
    """Folder of a Hugging Face model: config.json, safetensors, tokenizer.json."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the frozen base weights and of the engine's weights. Merging is always done in float32."""
    random_weights: bool = False
    """Make the weights from config.json and the run's seed instead of reading any, for measurements and rehearsals; the
    folder needs config.json and the tokenizer's files only."""
    layers: PositiveInt | None = None
    """With random_weights, cut the model to its first layers; None keeps all of them."""

    @model_validator(mode="after")
    def _only_random_weights_are_cut(self) -> ModelConfig:
        if self.layers is not None and not self.random_weights:
            raise ValueError("layers cuts a model that has no weights yet: set random_weights too, or leave layers out")
        return self


class OptimizerConfig(Section):
    lr: NonNegativeFloat = 1e-5
    min_lr: NonNegativeFloat = 0.0
    """Where linear and cosine schedules end."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    weight_decay: NonNegativeFloat = 0.0
    adam_beta1: Decay = 0.9
    adam_beta2: Decay = 0.95
    adam_eps: PositiveFloat = 1e-8
    clip_grad: NonNegativeFloat = 1.0
    """Global gradient norm limit; 0 turns clipping off."""
    lora_plus_ratio: PositiveFloat = 1.0
    """Learning rate of every B over that of every A (LoRA+, arXiv 2402.12354; there 16 worked well)."""


class TrainerConfig(Section):
    tp: PositiveInt = 1
    """Tensor parallel ranks of attention and dense layers (sequence parallel comes with it)."""
    pp: PositiveInt = 1
    """Pipeline stages."""
    cp: PositiveInt = 1
    """Context parallel ranks."""
    ep: PositiveInt = 1
    """Expert parallel ranks; they are the same ranks as TP and DP, so ep=2 with tp=1 makes two data parallel halves."""
    replicas: PositiveInt = 1
    """Rank groups: whole copies of the model, each pp x (least common multiple of tp x cp and ep) ranks."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recompute: "full" keeps only block inputs; "selective" recomputes attention."""
    micro_batch_tokens: PositiveInt = 8192
    """Token budget of one micro-batch, padding included. A longer sequence gets a micro-batch of its own."""
    threads_per_rank: Threads = 1
    """Torch threads of each rank when it runs on CPU."""
    optimizer: OptimizerConfig = OptimizerConfig()


class RolloutConfig(Section):
    engines: PositiveInt = 1
    """vLLM engines; each is one whole copy of the model for sampling."""
    tp: PositiveInt = 1
    """Tensor parallel workers of each engine."""
    max_model_len: PositiveInt = 4096
    """Longest prompt plus answer, in tokens. Prompts that leave no room for the answer are dropped and counted."""
    max_new_tokens: PositiveInt = 1024
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: int = -1
    """-1 is off."""
    stop: tuple[Text, ...] = ()
    """Strings that end an answer; the tokenizer's end-of-sequence token always does."""
    max_num_seqs: Annotated[int, Field(gt=0, le=2**16)] = 256
    """Sequences an engine samples at the same time."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.85
    kv_cache_gib: Annotated[float, Field(gt=0.0, le=2**14)] | None = None
    """Fixed size of the KV cache; None lets vLLM take what `gpu_memory_utilization` leaves (on CPU: 0.5 GiB). With a
    size, colocated engines and trainer start at the same time."""
    sleep: Literal["never", "kv", "weights"] = "never"
    """What colocated engines give back to the trainer between sampling and the next version: nothing, the KV cache, or
    the weights as well. After "weights" a sync sends all weights, not only the adapted ones. It needs max_staleness 0,
    since an engine that samples during the update has no memory to give."""
    enforce_eager: bool = False
    """Skip CUDA graphs: starts sooner, samples slower."""
    threads_per_engine: Threads = 1
    """Torch threads of each engine when it runs on CPU."""

    @field_validator("top_k")
    @classmethod
    def _top_k_is_off_or_positive(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError("use -1 to turn it off, or a number of at least 1")
        return value


class PlacementConfig(Section):
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """What a bundle is: one GPU, or a share of a CPU. "auto" takes GPUs if the cluster has any."""
    cpus_per_bundle: PositiveFloat = 1.0
    """CPU share that one rank or engine worker reserves. Below 1 more of them share a core."""
    strategy: Literal["PACK", "STRICT_PACK", "SPREAD"] = "PACK"
    """How Ray places the bundles of one rank group or engine; both PACKs keep a TP group on one node where it fits."""
    colocate: bool = False
    """Trainer ranks and engine workers share the same bundles (each takes half of a GPU)."""
    timeout_s: Seconds = 60.0
    """How long to wait for the cluster to grant the bundles before saying which are missing."""


class AlgorithmConfig(Section):
    advantage: Literal["grpo", "rloo", "dr_grpo"] = "grpo"
    """How rewards of one group become advantages."""
    clip_low: NonNegativeFloat = 0.2
    clip_high: NonNegativeFloat = 0.2
    """PPO ratio bounds 1 - clip_low and 1 + clip_high (DAPO's clip-higher: 0.28)."""
    tis_cap: NonNegativeFloat = 2.0
    """Truncated importance sampling: token weight min(trainer / sampler probability, cap); 0 turns it off."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL term to the reference, which is the same model with its adapters off."""
    loss_reduction: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Mean over all tokens of the batch, or over each sequence first."""
    updates_per_batch: PositiveInt = 1
    """Optimizer steps made from one batch of trajectories (PPO mini-batches)."""
    drop_uniform_groups: bool = True
    """Leave out groups whose samples all have the same reward: their advantage is zero."""


class PipelineConfig(Section):
    steps: PositiveInt = 100
    """Training steps (weight versions) of the run."""
    prompts_per_step: PositiveInt = 32
    samples_per_prompt: PositiveInt = 8
    max_staleness: NonNegativeInt = 1
    """Greatest allowed `trainer version - oldest token version`; 0 is synchronous training."""


class DataConfig(Section):
    train: str
    """A json, jsonl or parquet file, a folder written by `datasets.save_to_disk`, or a Hugging Face dataset name."""
    eval: str | None = None
    """Held-out prompts, same forms; None turns evaluation off."""
    split: str = "train"
    """Split of a Hugging Face dataset for training."""
    eval_split: str = "test"
    prompt_column: str = "question"
    answer_column: str = "answer"
    id_column: str | None = None
    """Column with a unique id; None numbers the rows."""
    system_prompt: str | None = None
    prompt_suffix: str = ""
    """Text put behind every question, such as a format to answer in."""
    chat_template: bool = True
    """Apply the tokenizer's chat template; off feeds the question as it is."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the chat template, such as `enable_thinking: false`."""
    max_prompt_tokens: PositiveInt = 1024
    """Longer prompts are dropped and counted."""
    shuffle: bool = True


class RewardConfig(Section):
    function: str = "gsm8k"
    """`gsm8k`, `math`, `reasoning_gym`, `length`, or your own as `module:function`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the reward function by name."""
    workers: Annotated[int, Field(gt=0, le=2**12)] = 1
    """CPU actors that score answers."""
    timeout_s: Seconds = 60.0
    """For scoring the answers of one prompt."""


class EvalConfig(Section):
    prompts: PositiveInt = 256
    """How many held-out prompts, from the first."""
    samples: PositiveInt = 1
    """Answers sampled for each."""
    temperature: NonNegativeFloat = 0.0
    """0 takes the most likely token."""
    every_steps: NonNegativeInt = 0
    """Also evaluate after every so many steps; 0 only before and after the run."""


class CheckpointConfig(Section):
    every_steps: NonNegativeInt = 50
    """0 saves only at the end. The step waits only for a copy in host memory; files are written while it goes on."""
    keep_last: PositiveInt = 3
    """The newest whole checkpoints that stay."""
    keep_best: NonNegativeInt = 0
    """Also keep so many with the best held-out reward, or, where `evaluation.every_steps` is 0, with the best mean
    reward of their step."""
    resume: Literal["auto", "never"] = "auto"
    """"auto" goes on from the newest whole checkpoint in the run folder or in `storage`, if there is one."""
    storage: Text | None = None
    """Where each checkpoint is also uploaded, below the run folder's name: a URI that pyarrow knows (s3://bucket/path,
    gs://..., file:///...; s3 takes ?endpoint_override=host:port&scheme=http) or a folder."""

    @field_validator("storage")
    @classmethod
    def _storage_is_a_uri_or_a_folder(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not value.strip():
            raise ValueError("give s3://bucket/path, gs://bucket/path, file:///folder or a folder, or leave it out")
        scheme, colon, rest = value.partition(":")
        if not colon or not re.fullmatch(r"[A-Za-z][\w+.-]*", scheme):
            return value
        if not rest.startswith("//"):
            raise ValueError(f"a URI has two slashes: write {scheme}://{rest.lstrip('/')}, or ./{value} for a folder")
        if scheme != "file" and not re.match("//[^/?]", rest):
            raise ValueError(f"it names no bucket: write {scheme}://bucket/path")
        return value


class SyncConfig(Section):
    mode: SyncMode = "merged"
    """What engines get after an update: "merged" weights W + (alpha / rank) B A, or as "adapter" A and B alone, for
    vLLM's own LoRA. Adapters are far fewer bytes and nothing is rounded into W; merged weights sample faster."""
    transport: Literal["auto", "nccl", "gloo", "cuda_ipc", "shared_memory"] = "auto"
    """What moves them; "auto" is NCCL between GPUs, and where engines can map the trainer's memory "cuda_ipc"
    (colocated GPUs) or "shared_memory" (CPU). Gloo works everywhere, between GPUs slowly: through host memory."""
    bucket_mib: Annotated[int, Field(gt=0, le=2**20)] = 256
    """They travel in buffers of this size; it bounds the extra memory of a sync."""


class TimeoutConfig(Section):
    """Seconds until a wait for another actor becomes an error that names it."""

    start_s: Seconds = 600.0
    rollout_s: Seconds = 1800.0
    """From sending a prompt to having all of its answers."""
    step_s: Seconds = 1800.0
    """One logprob or update stage."""
    sync_s: Seconds = 300.0
    checkpoint_s: Seconds = 600.0


class TrackingConfig(Section):
    wandb: Literal["auto", "online", "offline", "off"] = "auto"
    """"auto" is online if a W&B key is at hand, offline otherwise."""
    project: str = "rl-actors"
    name: str | None = None
    """Name of the run in W&B; None takes the run folder's name."""
    console: bool = True
    """Progress bar and messages of the driver."""


class RunConfig(Section):
    """One run. `rl_actors.paths` says where relative paths lie."""

    run_dir: str
    """Where checkpoints, metrics, trace and plots go."""
    model: ModelConfig
    data: DataConfig
    lora: LoraConfig = LoraConfig()
    trainer: TrainerConfig = TrainerConfig()
    rollout: RolloutConfig = RolloutConfig()
    placement: PlacementConfig = PlacementConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    pipeline: PipelineConfig = PipelineConfig()
    reward: RewardConfig = RewardConfig()
    evaluation: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    sync: SyncConfig = SyncConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
    tracking: TrackingConfig = TrackingConfig()
    seed: NonNegativeInt = 0

    @field_validator("run_dir")
    @classmethod
    def _run_dir_is_a_folder_of_its_own(cls, value: str) -> str:
        if not value.strip() or Path(os.path.normpath(value)).name in ("", ".", "..", "~"):
            raise ValueError("a run needs a folder of its own, such as runs/first")
        return value

    @property
    def run_path(self) -> Path:
        return output_path(self.run_dir)

    @model_validator(mode="after")
    def _lengths_fit(self) -> RunConfig:
        if self.rollout.max_new_tokens >= self.rollout.max_model_len:
            raise ValueError(
                f"rollout.max_new_tokens ({self.rollout.max_new_tokens}) leaves no room for a prompt within "
                f"rollout.max_model_len ({self.rollout.max_model_len}): lower the first or raise the second"
            )
        if self.rollout.sleep != "never" and not self.placement.colocate:
            raise ValueError(
                f"rollout.sleep is {self.rollout.sleep}, but no trainer shares the engines' GPUs to use the memory: "
                "set placement.colocate, or rollout.sleep to never"
            )
        if self.rollout.sleep == "weights" and self.sync.mode == "adapter":
            raise ValueError(
                "rollout.sleep is weights and sync.mode adapter: vLLM's LoRA would lose buffers that no sync brings "
                "back; set rollout.sleep to kv, or sync.mode to merged"
            )
        if self.rollout.sleep != "never" and self.pipeline.max_staleness > 0:
            raise ValueError(
                f"rollout.sleep is {self.rollout.sleep} and pipeline.max_staleness {self.pipeline.max_staleness}: "
                "engines that sample during the update cannot sleep; set max_staleness to 0, or rollout.sleep to never"
            )
        saves, evaluations = self.checkpoint.every_steps, self.evaluation.every_steps
        if self.checkpoint.keep_best and self.data.eval and evaluations and saves % evaluations:
            raise ValueError(
                f"checkpoint.keep_best needs a held-out reward for each checkpoint: make checkpoint.every_steps "
                f"({saves}) a multiple of evaluation.every_steps ({evaluations}), or set evaluation.every_steps to 0"
            )
        if self.pipeline.samples_per_prompt < 2:
            raise ValueError(
                "pipeline.samples_per_prompt must be at least 2: advantages compare the samples of one prompt"
            )
        return self
