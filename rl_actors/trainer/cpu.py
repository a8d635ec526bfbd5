"""All it takes to run Megatron-Core 0.19.2 and Megatron-Bridge 0.6.2 on CPU with gloo.

Imported only when no GPU is used, and `install()` runs before the first `import megatron`. Every entry says which
library needs it, why, and how to know that it can go. Nothing here changes a number: only devices, streams and
random generators are replaced, so a CPU run computes what a GPU run computes.

The patches are plain replacements in `torch` and Megatron, not a `TorchFunctionMode`: a mode lives in one thread and
costs on every operation, while Ray calls an actor from several threads.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._device

_installed = False


def install() -> None:
    """Make this process run Megatron on CPU. Safe to call again; later calls do nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    _without_compile()
    _cuda_names_on_cpu()
    _cuda_literals_on_cpu()
    sys.meta_path.insert(0, _LoraLayersFinder())
    with _absent("flashinfer", "vllm"), _lent_modelopt():
        _megatron_core()
        _megatron_bridge()


def _without_compile() -> None:
    """Megatron-Core decorates fused functions with `torch.compile` (megatron.core.jit.jit_fuser).

    On CPU that compiles C++ for minutes to win nothing. Can go when `jit_fuser` can be chosen by configuration.
    """
    import torch._dynamo

    torch._dynamo.config.disable = True


@contextlib.contextmanager
def _absent(*packages: str) -> Iterator[None]:
    """While Megatron is imported, some installed packages count as not installed.

    flashinfer: Megatron-Core (inference/moe) imports it for GPU kernels; its import checks the version of its kernel
    package and fails hard, not with ImportError. vllm: it takes seconds and nothing here needs it. Can go when both
    imports are lazy.
    """
    hidden = [package for package in packages if package not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for package in hidden:
            sys.modules.pop(package, None)


class _NoStream:
    """Stands for a CUDA stream or event: CPU work is done when its call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    wait_stream = wait_event = wait = synchronize = record = nothing

    def record_event(self, *args: Any, **kwargs: Any) -> _NoStream:
        return self


_STREAM = _NoStream()


@contextlib.contextmanager
def _stream_context(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _cuda_names_on_cpu() -> None:
    """Functions of `torch.cuda` that Megatron-Core calls without asking whether a GPU is there.

    `current_device` feeds `device=` of buffers in tensor_parallel/mappings.py, layers.py, p2p_communication.py;
    streams and events belong to the MoE token dispatcher and gradient buffers; seeds to the RNG tracker.
    Each can go when the Core version no longer names it (grep for `torch.cuda.<name>`).
    """
    cpu = torch.device("cpu")

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    replacements: dict[str, Any] = {
        "current_device": lambda: cpu,
        "current_stream": lambda *args, **kwargs: _STREAM,
        "default_stream": lambda *args, **kwargs: _STREAM,
        "Stream": _NoStream,
        "Event": _NoStream,
        "stream": _stream_context,
        "synchronize": nothing,
        "empty_cache": nothing,
        "set_device": nothing,
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)


def _cuda_literals_on_cpu() -> None:
    """Literal `device="cuda"` and `.cuda()` in Megatron-Core, and type names its optimizers assert.

    Literals: pipeline_parallel/schedules.py (token counts), optimizer/clip_grads.py and optimizer.py (norms, scales),
    transformer/utils.py (causal mask), utils.py (local_multi_tensor_l2_norm). `.cuda()`: embeddings and rope.
    `Tensor.type()`: optimizer.py, distrib_optimizer.py and clip_grads.py compare with 'torch.cuda.FloatTensor'.
    Can go when these files take the device from a tensor and compare dtypes.
    """

    def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(factory)
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            device = kwargs.get("device")
            if device is not None and str(device).startswith("cuda"):
                kwargs["device"] = "cpu"
            return factory(*args, **kwargs)

        return call

    # `with torch.device(...)` knows the factories by identity and lists them on first use: let it list the originals.
    torch.utils._device._device_constructors()
    for name in ("zeros", "ones", "empty", "full", "tensor", "arange"):
        setattr(torch, name, on_cpu(getattr(torch, name)))

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    original_type = torch.Tensor.type

    def type_name(self: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        if dtype is None:
            name = str(original_type(self))
            return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)
        return original_type(self, dtype, **kwargs)

    torch.Tensor.cuda = cuda  # type: ignore[method-assign, assignment]
    torch.Tensor.type = type_name  # type: ignore[method-assign, assignment]


class _LoraLayersFinder(importlib.abc.MetaPathFinder):
    """Lends `megatron.bridge.peft.lora_layers` a placeholder for Transformer Engine while it is executed.

    Bridge imports `transformer_engine.pytorch` at the top of that one module and uses it only in annotations and in
    classes for GPU. The placeholder is taken away again, so everything else sees Transformer Engine as absent.
    Can go when that import stands in a `try`.
    """

    _module = "megatron.bridge.peft.lora_layers"

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_with_placeholder(module: types.ModuleType) -> None:
            package = types.ModuleType("transformer_engine")
            pytorch = _Placeholder("transformer_engine.pytorch")
            package.pytorch = pytorch  # type: ignore[attr-defined]
            lent = {"transformer_engine": package, "transformer_engine.pytorch": pytorch}
            sys.modules.update(lent)
            try:
                execute(module)
            finally:
                for name in lent:
                    sys.modules.pop(name, None)

        spec.loader.exec_module = exec_with_placeholder  # type: ignore[method-assign]
        return spec


class _Placeholder(types.ModuleType):
    """A module whose every name is an empty class, good for annotations and base classes only."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Placeholder(f"{self.__name__}.{name}") if name == "ops" else type(name, (), {})
        setattr(self, name, value)
        return value


class _ModelOptFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers every import of ModelOpt with a placeholder."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        ours = fullname.partition(".")[0] == "modelopt"
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Placeholder(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextlib.contextmanager
def _lent_modelopt() -> Iterator[None]:
    """While Megatron is imported, ModelOpt is a placeholder.

    Bridge imports it at the top of modules for quantization and distillation, which are not used here; with scipy, peft
    and accelerate that is a quarter of the time of Bridge's import. What asks for it later gets the real one. Can go
    when Bridge imports it where it uses it.
    """
    if "modelopt" in sys.modules:
        yield
        return
    finder = _ModelOptFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "modelopt"]:
            del sys.modules[name]


def _megatron_core() -> None:
    """Replacements inside Megatron-Core."""
    _rng_tracker()
    _norm()
    _moe_splits()


def _rng_tracker() -> None:
    """tensor_parallel/random.py keeps generator states of the GPU; here they are the CPU generator's.

    As on GPU, `fork` draws from a generator seeded per tensor-parallel rank and puts the outer state back. Can go when
    `CudaRNGStatesTracker` takes a device.
    """
    from megatron.core.tensor_parallel import random

    class CpuRNGStatesTracker(random.CudaRNGStatesTracker):
        def add(self, name: str, seed: int) -> None:
            self._is_initialized = True
            if seed in self.seeds_ or name in self.states_:
                raise ValueError(f"random state {name!r} with seed {seed} exists already")
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            outer = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outer)

    def get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    random.CudaRNGStatesTracker = CpuRNGStatesTracker
    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state


def _norm() -> None:
    """transformer/torch_norm.py refuses sequence parallelism, which TP and MoE need.

    The norm itself is the same; sequence parallelism only asks that its weight says so, for the gradient reduction.
    Can go when `WrappedTorchNorm` accepts `config.sequence_parallel`.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def build(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> torch.nn.Module:
        norm_class = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}[config.normalization]
        norm = norm_class(normalized_shape=hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm

    WrappedTorchNorm.__new__ = build


def _moe_splits() -> None:
    """transformer/moe: `maybe_move_tensor_to_cpu` skips CPU tensors, but all-to-all wants split sizes as numpy.

    Can go when it honours `as_numpy` for CPU tensors.
    """
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = to_host
    token_dispatcher.maybe_move_tensor_to_cpu = to_host


def _megatron_bridge() -> None:
    """megatron.bridge.peft.utils decides from importable names that Transformer Engine is there, which is wrong here.

    Can go when `HAVE_TE` is False in a process without Transformer Engine.
    """
    import megatron.bridge.peft.utils as peft_utils

    peft_utils.HAVE_TE = False
