"""Log-probabilities without logits against the plain way: `python -m jobs.bench.logprobs [--json]`.

Both ways take the same hidden states, output layer and targets and give log-probabilities, entropies and the gradient
of the hidden states; runs of both alternate in one process. The plain way is a linear layer, log_softmax and autograd.
Peak memory is counted above the inputs (on GPUs only). Needs torch alone and one device.

`logprob_error` is the greatest difference from float64 over some tokens; on GPUs most of it is logits rounded to
bfloat16, the same in both. `logprob_difference` and `gradient_difference` (relative) are from the plain way, over all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace

import torch
from torch.nn import functional

from rl_actors.trainer.logprobs import chunk_tokens, token_logprobs

REFERENCE_TOKENS = 64

Way = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""hidden states [T, H] -> (logprobs float32 [T], entropy float32 [T])."""


@dataclass(frozen=True)
class Problem:
    """What all ways work on: hidden [T, H], weight [V, H], targets [T], each token's weight in the loss [T]."""

    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    loss_weights: torch.Tensor
    temperature: float

    @property
    def device(self) -> torch.device:
        return self.hidden.device


@dataclass(frozen=True)
class Row:
    """One way measured: median seconds, and bytes above the inputs (None on CPU)."""

    name: str
    seconds: float
    peak_bytes: int | None
    logprob_error: float
    logprob_difference: float
    entropy_difference: float
    gradient_difference: float | None


@dataclass(frozen=True)
class Result:
    logprobs: torch.Tensor
    entropy: torch.Tensor
    gradient: torch.Tensor | None


def main(argv: Sequence[str] | None = None) -> int:
    arguments = read_arguments(argv)
    problem = make_problem(arguments)
    columns = len(problem.weight)
    chunk = arguments.chunk or chunk_tokens(columns)
    rows = compare(problem, chunk, arguments.repeats)
    show(rows, problem, chunk)
    if arguments.json:
        plain, ours = rows[0], rows[1]
        device = torch.cuda.get_device_name() if problem.device.type == "cuda" else "cpu"
        print(
            json.dumps(
                {
                    "rows": [asdict(row) for row in rows],
                    "time_ratio": ours.seconds / plain.seconds,
                    "peak_ratio": ours.peak_bytes / plain.peak_bytes if ours.peak_bytes and plain.peak_bytes else None,
                    "device": device,
                    "torch": torch.__version__,
                    "tokens": len(problem.hidden),
                    "vocabulary": columns,
                    "hidden": problem.hidden.shape[1],
                    "chunk": chunk,
                    "temperature": problem.temperature,
                }
            )
        )
    return 0


def read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Sizes default to Qwen3-30B-A3B's on a GPU and to small ones on a CPU."""
    parser = argparse.ArgumentParser(prog="python -m jobs.bench.logprobs", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tokens", type=int, help="tokens (default 16384 on a GPU, 1024 on a CPU)")
    parser.add_argument("--vocabulary", type=int, help="tokens of the vocabulary (default 151936 or 8192)")
    parser.add_argument("--hidden", type=int, help="width of hidden states (default 2048 or 256)")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--chunk", type=int, help="tokens of a chunk (default: the trainer's)")
    parser.add_argument("--repeats", type=int, default=7, help="measured runs of each way, after one to warm up")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    arguments = parser.parse_args(argv)
    if arguments.device == "auto":
        arguments.device = "gpu" if torch.cuda.is_available() else "cpu"
    elif arguments.device == "gpu" and not torch.cuda.is_available():
        parser.error("--device gpu: torch sees no GPU; use --device cpu")
    on_gpu = arguments.device == "gpu"
    arguments.tokens = arguments.tokens or (16384 if on_gpu else 1024)
    arguments.vocabulary = arguments.vocabulary or (151_936 if on_gpu else 8192)
    arguments.hidden = arguments.hidden or (2048 if on_gpu else 256)
    arguments.dtype = arguments.dtype or ("bfloat16" if on_gpu else "float32")
    if min(arguments.tokens, arguments.vocabulary, arguments.hidden, arguments.repeats, arguments.chunk or 1) < 1:
        parser.error("sizes and repeats must be at least 1")
    if arguments.temperature <= 0:
        parser.error("--temperature must be above 0")
    return arguments


def make_problem(arguments: argparse.Namespace) -> Problem:
    """Random numbers whose logits have a standard deviation of 3: neither flat nor decided."""
    device = torch.device("cuda" if arguments.device == "gpu" else "cpu")
    dtype = getattr(torch, arguments.dtype)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    return Problem(
        normal(arguments.tokens, arguments.hidden).to(dtype),
        (normal(arguments.vocabulary, arguments.hidden) * (3.0 / arguments.hidden**0.5)).to(dtype),
        torch.randint(0, arguments.vocabulary, (arguments.tokens,), device=device, generator=generator),
        normal(arguments.tokens),
        arguments.temperature,
    )


def plain(problem: Problem) -> Way:
    def way(hidden_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = functional.linear(hidden_TH, problem.weight).float()
        if problem.temperature != 1.0:
            logits = logits / problem.temperature
        logprobs = torch.log_softmax(logits, dim=-1)
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
        return logprobs.gather(1, problem.targets[:, None])[:, 0], entropy

    return way


def chunked(problem: Problem, chunk: int) -> Way:
    def way(hidden_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprobs(
            hidden_TH,
            problem.weight,
            problem.targets,
            problem.temperature,
            len(problem.weight),
            chunk=chunk,
        )

    return way


def compare(problem: Problem, chunk: int, repeats: int) -> list[Row]:
    """Measure all ways in turns; the plain one is first, ours is second."""
    ways: dict[str, tuple[Way, bool]] = {
        "plain": (plain(problem), True),
        "chunks": (chunked(problem, chunk), True),
        "one chunk of all tokens": (chunked(problem, len(problem.hidden)), True),
        "plain, no gradient": (plain(problem), False),
        "chunks, no gradient": (chunked(problem, chunk), False),
    }
    reference = float64_logprobs(problem)
    expected = run_once(problem, *ways["plain"])
    rows = []
    for name, (way, train) in ways.items():
        result, peak = with_peak(problem, way, train)
        rows.append(row(name, peak, result, expected, reference))
        del result
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, (way, train) in ways.items():
            seconds[name].append(timed(problem, way, train))
    return [replace(row, seconds=statistics.median(seconds[row.name])) for row in rows]


def run_once(problem: Problem, way: Way, train: bool) -> Result:
    hidden = problem.hidden.detach().requires_grad_(train)
    with torch.set_grad_enabled(train):
        logprobs, entropy = way(hidden)
        if train:
            (logprobs * problem.loss_weights).sum().backward()  # type: ignore[no-untyped-call]
    return Result(logprobs.detach(), entropy, hidden.grad)


def with_peak(problem: Problem, way: Way, train: bool) -> tuple[Result, int | None]:
    """One run and the most memory it took above what was there before."""
    if problem.device.type != "cuda":
        return run_once(problem, way, train), None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run_once(problem, way, train)
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before


def timed(problem: Problem, way: Way, train: bool) -> float:
    """Seconds of one run, by CUDA events on a GPU."""
    if problem.device.type != "cuda":
        begin = time.perf_counter()
        run_once(problem, way, train)
        return time.perf_counter() - begin
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run_once(problem, way, train)
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) / 1000


def float64_logprobs(problem: Problem) -> torch.Tensor:
    """float64 [REFERENCE_TOKENS or fewer], of the first tokens."""
    some = slice(REFERENCE_TOKENS)
    logits = problem.hidden[some].double() @ problem.weight.double().t() / problem.temperature
    return torch.log_softmax(logits, dim=-1).gather(1, problem.targets[some, None])[:, 0]


def row(name: str, peak: int | None, result: Result, expected: Result, reference: torch.Tensor) -> Row:
    gradient = None
    if result.gradient is not None and expected.gradient is not None:
        wanted = expected.gradient.float()
        gradient = float((result.gradient.float() - wanted).norm() / wanted.norm())
    return Row(
        name=name,
        seconds=0.0,
        peak_bytes=peak,
        logprob_error=float((result.logprobs[: len(reference)].double() - reference).abs().max()),
        logprob_difference=float((result.logprobs - expected.logprobs).abs().max()),
        entropy_difference=float((result.entropy - expected.entropy).abs().max()),
        gradient_difference=gradient,
    )


def show(rows: list[Row], problem: Problem, chunk: int) -> None:
    """The table for people."""
    tokens, columns = len(problem.hidden), len(problem.weight)
    print(f"{tokens} tokens x {columns}, hidden {problem.hidden.shape[1]}, {problem.hidden.dtype}, chunk {chunk}\n")
    print(f"{'way':<25}{'ms':>9}{'peak GiB':>10}" + "".join(f"{field.name:>21}" for field in fields(Row)[3:]))
    for line in rows:
        peak = "" if line.peak_bytes is None else f"{line.peak_bytes / 2**30:.2f}"
        figures = [line.logprob_error, line.logprob_difference, line.entropy_difference, line.gradient_difference]
        shown = "".join(f"{'' if figure is None else format(figure, '.1e'):>21}" for figure in figures)
        print(f"{line.name:<25}{line.seconds * 1000:>9.2f}{peak:>10}{shown}")
    print()


if __name__ == "__main__":
    raise SystemExit(main())
