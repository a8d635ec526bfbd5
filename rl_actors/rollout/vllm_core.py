"""vLLM, one step at a time, from one thread.

We drive vLLM's engine core directly. `LLMEngine.step` would also decode text and build output objects for every token
of every request; for a small model that costs more than the model, and a trajectory needs only ids and logprobs.
Text is decoded once, when an answer is finished.

The prefix cache never serves KV of older weights. Every request carries a cache salt that stands for the weights it was
admitted under; after a change new requests get a new salt, and so do those that hold no KV yet (waiting or preempted).
Requests that are running keep their KV and their salt, so what they add to the cache is invisible to later requests.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from rl_actors.config import RunConfig
from rl_actors.errors import ConfigError
from rl_actors.rollout import sleep
from rl_actors.rollout.samples import Sample, Sampling, sample_seed
from rl_actors.rollout.vllm_settings import Device, engine_arguments, prepare_process
from rl_actors.types import Prompt

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer
    from vllm.v1.request import Request


class VllmCore:
    """An in-process vLLM engine. All methods but `stats` must be called from the thread that made it."""

    def __init__(self, name: str, config: RunConfig, device: Device, version: int = 0) -> None:
        prepare_process(device, config.rollout.threads_per_engine)
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        if device == "cpu" and config.sync.mode == "adapter":
            from rl_actors.rollout.cpu_experts import lend_expert_lora

            lend_expert_lora()
        self.name = name
        self.version = version
        self._max_model_len = config.rollout.max_model_len
        self.llm = LLMEngine.from_engine_args(EngineArgs(**engine_arguments(config, device)))
        client: Any = self.llm.engine_core
        self._core = client.engine_core
        self._scheduler = self._core.scheduler
        self._tokenizer: Any = self.llm.get_tokenizer()
        self._weights_seen = 0
        self._asleep: set[str] = set()
        self._slept: sleep.Part = "kv"
        self._weights_lost = False
        self.first_token_at: float | None = None
        self._request_numbers = itertools.count()
        self._requests: dict[str, tuple[Sample, Request]] = {}
        self._stop_finders: dict[str, IncrementalDetokenizer] = {}
        self._tokens = 0
        self._busy_s = 0.0
        self._preemptions = 0
        self._prompt_tokens = 0
        self._cached_prompt_tokens = 0
        self._adapter: LoRARequest | None = None
        if config.sync.mode == "adapter":
            from rl_actors.weight_sync.lora_slot import lora_request, open_slot

            self._adapter = lora_request()
            self.apply_model(open_slot, config.lora.rank, config.lora.normalize_moe_lora)

    # Requests

    def check_prompt(self, prompt: Prompt) -> None:
        """Raises ConfigError if the prompt is empty or leaves no room for one token."""
        length = len(prompt.token_ids)
        if not 0 < length < self._max_model_len:
            raise ConfigError(
                f"prompt {prompt.id!r} has {length} tokens; {self.name} needs at least 1 and, to leave room for an "
                f"answer, fewer than rollout.max_model_len ({self._max_model_len})"
            )

    def add(self, prompt: Prompt, samples: int, seed: int, sampling: Sampling) -> list[Sample]:
        """Admit `samples` independent requests for one prompt; they start with the next step."""
        self.check_prompt(prompt)
        template = self._request_template(prompt, sampling)
        return [self._add_one(template, prompt, sample_seed(seed, prompt.id, index)) for index in range(samples)]

    def _add_one(self, template: EngineCoreRequest, prompt: Prompt, seed: int) -> Sample:
        request = copy.copy(template)
        request.request_id = f"{self.name}/{prompt.id}/{next(self._request_numbers)}"
        request.sampling_params = copy.copy(template.sampling_params)
        assert request.sampling_params is not None
        request.sampling_params.seed = seed
        sample = Sample(request.request_id, prompt)
        if request.sampling_params.stop:
            from vllm.v1.engine.detokenizer import IncrementalDetokenizer

            self._stop_finders[request.request_id] = IncrementalDetokenizer.from_new_request(self._tokenizer, request)
        self.llm.engine_core.add_request(request)
        self._requests[request.request_id] = sample, self._scheduler.requests[request.request_id]
        return sample

    def _request_template(self, prompt: Prompt, sampling: Sampling) -> EngineCoreRequest:
        """What the samples of a prompt share, checked and completed (end-of-sequence tokens) by vLLM."""
        from vllm.inputs.engine import tokens_input

        token_ids = prompt.token_ids.tolist()
        return self.llm.input_processor.process_inputs(
            prompt.id,
            tokens_input(token_ids, cache_salt=self._cache_salt()),
            self._sampling_params(sampling, self._max_model_len - len(token_ids)),
            lora_request=self._adapter,
            supported_tasks=self.llm.get_supported_tasks(),
        )

    def _sampling_params(self, sampling: Sampling, room: int) -> SamplingParams:
        from vllm.sampling_params import SamplingParams

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=min(sampling.max_new_tokens, room),
            stop=list(sampling.stop),
            detokenize=bool(sampling.stop),
            include_stop_str_in_output=True,
            # 0 asks for the logprob of the sampled token alone.
            logprobs=0,
        )

    def abort(self, samples: Iterable[Sample]) -> None:
        """Forget requests; those that are finished already are skipped."""
        request_ids = [sample.request_id for sample in samples if sample.request_id in self._requests]
        self.llm.engine_core.abort_requests(request_ids)
        for request_id in request_ids:
            self._forget(request_id)

    def _forget(self, request_id: str) -> Sample:
        sample, request = self._requests.pop(request_id)
        self._stop_finders.pop(request_id, None)
        self._preemptions += request.num_preemptions
        return sample

    # Steps

    def has_work(self) -> bool:
        """Whether a step would do anything, the removal of finished requests from the worker's batch included."""
        return self._scheduler.has_requests() or bool(self._core.batch_queue)

    def step(self) -> list[Sample]:
        """Sample one token for each running request; returns the answers that are finished with it."""
        started = time.perf_counter()
        finished = self._take(self.llm.engine_core.get_output().outputs)
        self._busy_s += time.perf_counter() - started
        return finished

    def drain(self) -> list[Sample]:
        """Finish steps that are launched but not read (async scheduling on GPU runs one ahead), launching no more."""
        finished: list[Sample] = []
        self._core.pause_scheduler(mode="keep", clear_cache=False)
        while self._core.batch_queue:
            finished += self.step()
        self._core.resume_scheduler()
        return finished

    def _take(self, outputs: list[EngineCoreOutput]) -> list[Sample]:
        finished = []
        for output in outputs:
            entry = self._requests.get(output.request_id)
            if entry is None:
                continue
            sample = entry[0]
            if output.new_token_ids:
                assert output.new_logprobs is not None
                logprobs = output.new_logprobs.logprobs[:, 0].tolist()
                sample.append(output.new_token_ids, logprobs, self.version)
                self._tokens += len(output.new_token_ids)
                self.first_token_at = self.first_token_at or time.time()
            if output.prefill_stats is not None:
                self._prompt_tokens += output.prefill_stats.num_prompt_tokens
                self._cached_prompt_tokens += output.prefill_stats.num_cached_tokens
            if self._is_finished(sample, output):
                finished.append(self._forget(output.request_id))
        return finished

    def _is_finished(self, sample: Sample, output: EngineCoreOutput) -> bool:
        finder = self._stop_finders.get(output.request_id)
        found = finder is not None and finder.update(output.new_token_ids, False) is not None
        if output.finish_reason is not None:
            sample.finish_reason = str(output.finish_reason)
            if sample.finish_reason not in ("stop", "length"):
                raise RuntimeError(f"vLLM ended request {output.request_id} with {sample.finish_reason!r}")
        if found:
            if output.finish_reason is None:
                self.llm.engine_core.abort_requests([output.request_id])
            sample.finish_reason = "stop"
        return sample.finish_reason is not None

    def texts(self, samples: list[Sample]) -> list[str]:
        """Decoded answers, special tokens left out."""
        return self._tokenizer.batch_decode([sample.token_ids for sample in samples], skip_special_tokens=True)

    # Weights

    def _cache_salt(self) -> str:
        # Not the version: a run that goes back to an older checkpoint uses a number twice, with other weights.
        return f"weights-{self._weights_seen}"

    def weights_changed(self, version: int) -> None:
        """The model's weights were replaced and now are `version`. Call it after `drain`, before the next step."""
        self.version = version
        self._weights_seen += 1
        self._weights_lost = False
        for request in itertools.chain(self._scheduler.waiting, self._scheduler.skipped_waiting):
            if request.num_computed_tokens == 0:
                request.cache_salt = self._cache_salt()
                request.block_hashes.clear()
                request.update_block_hashes()
        if not self._scheduler.running:
            # Not needed for correctness, but old blocks would only wait to be evicted.
            self.llm.reset_prefix_cache()

    def apply_model(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(model, *args)` on the torch model of every worker, without gradients; one result per worker."""
        self.wake(sleep.WEIGHTS)
        return self.llm.apply_model(_WithoutGradients(function, args))

    # Memory

    def sleep(self, part: sleep.Part) -> None:
        """Give GPU memory back; see `sleep`. Call it after `drain`, while awake."""
        if self._asleep:
            return
        self._slept = part
        if part == "kv":
            self._core.pause_scheduler(mode="keep", clear_cache=True)
            self.llm.collective_rpc(sleep.free_kv_cache)
            self._asleep = {sleep.KV_CACHE}
        else:
            self.llm.sleep(2, mode="keep")
            self._asleep, self._weights_lost = {sleep.KV_CACHE, sleep.WEIGHTS}, True

    def wake(self, *parts: str) -> None:
        """Take memory again, all of it if none is named. What is awake stays so."""
        for part in self._asleep & set(parts or (sleep.WEIGHTS, sleep.KV_CACHE)):
            if self._slept == "kv":
                self.llm.collective_rpc(sleep.map_kv_cache)
            else:
                self.llm.wake_up([part])
            self._asleep.discard(part)
            if not self._asleep:
                self._core.resume_scheduler()

    @property
    def weights_lost(self) -> bool:
        """The weights were given back, and no sync has brought new ones."""
        return self._weights_lost

    # Figures

    def stats(self) -> dict[str, float]:
        """Counters since the start and the present load. Safe from any thread."""
        running, waiting = self._scheduler.get_request_counts()
        live = list(self._requests.values())
        return {
            "running": running,
            "waiting": waiting,
            "tokens": self._tokens,
            "busy_s": self._busy_s,
            "kv_use": self._scheduler.kv_cache_manager.usage,
            "preemptions": self._preemptions + sum(request.num_preemptions for _, request in live),
            "prefix_hit_rate": self._cached_prompt_tokens / max(1, self._prompt_tokens),
        }


class _WithoutGradients:
    """A call that can be sent to the workers. They hold the model; it is passed as the first argument."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._function = function
        self._args = args

    def __call__(self, model: Any) -> Any:
        import torch

        with torch.no_grad():
            return self._function(model, *self._args)
