"""A reward name gives a function, or one sentence that says which part of it is wrong."""

import pytest

from rl_actors.errors import ConfigError
from rl_actors.rewards.registry import BUILT_IN, resolve


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in(name):
    assert callable(resolve(name, {}))


def test_own_function(prompt):
    assert resolve("reward_samples:length", {"scale": 2.0})(prompt(), "abc", scale=2.0) == 6.0


def test_function_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "my_rewards_of_this_test.py").write_text("def score(prompt, text):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    assert resolve("my_rewards_of_this_test:score")(None, "") == 1.0


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("gsm8", None, r"'gsm8' is not one of gsm8k, length, math, reasoning_gym: did you mean 'gsm8k'\?"),
        ("xyz", None, "name your own function as module:function"),
        ("reward_sample:length", None, "there is no module 'reward_sample'"),
        ("no_package.rewards:length", None, "there is no module 'no_package'"),
        ("reward_samples:lenght", None, r"has no 'lenght': did you mean reward_samples:length\?"),
        ("reward_samples:NOT_A_FUNCTION", None, "NOT_A_FUNCTION is a int, not a function"),
        ("json:JSONDecoder", {"strange": 1}, "takes .*not|do not fit"),
        ("reward_samples:length", {"scael": 1}, "do not fit .*scael"),
        ("reward_samples:wants_more", {}, "do not fit .*tolerance"),
        ("gsm8k", {"strickt": True}, "do not fit 'gsm8k', which takes .*strict: "),
        ("os:getcwd", None, r"takes \(\), not \(prompt, text"),
    ],
)
def test_faults(name, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        resolve(name, kwargs)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import a_package_that_is_not_here", "needs 'a_package_that_is_not_here', which is missing"),
        ("1 / 0", "importing .* raised ZeroDivisionError"),
        ("def (", "raised SyntaxError"),
    ],
)
def test_module_that_cannot_be_imported(tmp_path, monkeypatch, code, message):
    name = f"broken_rewards_{abs(hash(code))}"
    (tmp_path / f"{name}.py").write_text(code + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=message):
        resolve(f"{name}:score")


def test_near_module_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no module 'my_reward': did you mean my_rewards\?"):
        resolve("my_reward:score")
