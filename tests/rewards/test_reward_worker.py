"""A failing reward is an error that names function and prompt, and the worker goes on after it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rl_actors.errors import RewardError
from rl_actors.rewards.worker import RewardWorker


@pytest.fixture
def worker():
    made = []

    def make(function, timeout_s=30.0, **kwargs):
        made.append(RewardWorker(function, kwargs, timeout_s))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_scores_in_order_with_arguments(worker, prompt):
    scores = worker("reward_samples:length", scale=0.5).score(prompt(), ["a", "", "abc"])
    assert scores.dtype == np.float32
    assert scores.tolist() == [0.5, 0.0, 1.5]


def test_built_in_function(worker, prompt):
    assert worker("gsm8k").score(prompt("#### 18"), ["#### 18", "17"]).tolist() == [1.0, 0.0]


def test_async_functions_run_together(worker, prompt):
    texts = ["a", "b", "c"]
    assert worker("reward_samples:waiting").score(prompt(texts=texts), texts).tolist() == [1.0, 1.0, 1.0]


def test_function_that_raises(worker, prompt):
    one = worker("reward_samples:raises")
    with pytest.raises(
        RewardError, match=r"'reward_samples:raises' on prompt 'row-7': KeyError: 'no such field' \(in raises"
    ):
        one.score(prompt(), ["good", "bad"])
    assert one.score(prompt(), ["good"]).tolist() == [1.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("none", "returned None of type NoneType"),
        ("nan", "returned nan, not a finite number"),
        ("infinite", "returned inf"),
        ("text", "returned '1.0' of type str"),
        ("vector", "of type ndarray"),
        ("above float32", r"returned 1e\+39, which is not finite as float32"),
        ("huge", "too large for float32"),
    ],
)
def test_values_that_are_no_numbers(shared_returns, prompt, text, message):
    with pytest.raises(RewardError, match=f"row-7.*{message}"):
        shared_returns.score(prompt(), [text])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises_lines", r"ValueError: first second \(in raises_lines"),
        ("raises_unreadable", r"UnreadableError: \(its message cannot be read: __str__ raised TypeError\) \(in "),
    ],
)
def test_the_message_of_an_exception_is_one_line(worker, prompt, function, message):
    with pytest.raises(RewardError, match=message) as caught:
        worker(f"reward_samples:{function}").score(prompt(), ["a"])
    assert "\n" not in str(caught.value)


def test_values_that_are_numbers(shared_returns, prompt):
    assert shared_returns.score(prompt(), ["true", "numpy", "array"]).tolist() == [1.0, 0.5, 0.5]


@pytest.fixture(scope="module")
def shared_returns():
    one = RewardWorker("reward_samples:returns")
    yield one
    one.close()


def test_function_that_hangs_is_ended_and_the_worker_goes_on(worker, prompt):
    one = worker("reward_samples:hangs", timeout_s=1.0)
    child = one._child
    started = time.monotonic()
    with pytest.raises(RewardError, match=r"did not score prompt 'row-7' within 1 s \(2 answers\)"):
        one.score(prompt(), ["ok", "hang"])
    assert time.monotonic() - started < 20.0
    assert child.poll() is not None
    assert one.score(prompt(), ["ok"]).tolist() == [1.0]


def test_function_that_kills_its_process(worker, prompt):
    one = worker("reward_samples:dies")
    with pytest.raises(RewardError, match="on prompt 'row-7': its process died with exit code 7"):
        one.score(prompt(), ["die"])
    assert one.score(prompt(), ["ok"]).tolist() == [1.0]


def test_function_that_leaves(worker, prompt):
    with pytest.raises(RewardError, match="SystemExit: enough"):
        worker("reward_samples:leaves").score(prompt(), ["a"])


def test_function_that_cannot_be_resolved():
    with pytest.raises(RewardError, match=r"could not be started: ConfigError: .*has no 'nothing'"):
        RewardWorker("reward_samples:nothing")


def test_close_ends_the_process(worker):
    one = worker("gsm8k")
    child = one._child
    one.close()
    assert child.poll() is not None


def test_hanging_function_ends_with_a_killed_worker():
    code = (
        "import numpy, threading, time\n"
        "from rl_actors.rewards.worker import RewardWorker\n"
        "from rl_actors.types import Prompt\n"
        "one = RewardWorker('reward_samples:hangs', timeout_s=600)\n"
        "args = (Prompt('p', numpy.zeros(1), ''), ['hang'])\n"
        "threading.Thread(target=one.score, args=args, daemon=True).start()\n"
        "time.sleep(1)\n"
        "print(one._child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as owner:
        child = int(owner.stdout.readline())
        assert Path(f"/proc/{child}").exists()
        owner.kill()
    deadline = time.monotonic() + 20.0
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _runs(child)


def _runs(pid):
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
