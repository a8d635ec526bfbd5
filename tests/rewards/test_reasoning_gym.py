"""A row is scored by the reasoning-gym task that made it."""

import pytest
import reasoning_gym as gym

from rl_actors.rewards.reasoning_gym import final_answer, reward


@pytest.fixture
def row(prompt):
    def make(task):
        entry = gym.create_dataset(task, seed=1, size=1)[0]
        return prompt(entry["answer"], **entry["metadata"])

    return make


@pytest.mark.parametrize("task", ["chain_sum", "basic_arithmetic", "countdown", "spell_backward"])
def test_the_right_answer_scores_one(row, task):
    made = row(task)
    answer = made.metadata.get("expression", made.answer) if task == "countdown" else made.answer
    assert reward(made, f"let me see <answer>{answer}</answer>") == 1.0


def test_wrong_and_partial_answers(row):
    made = row("chain_sum")
    assert reward(made, "<answer>x</answer>") == 0.0
    assert 0.0 < reward(made, f"<answer>{made.answer} or so</answer>") < 1.0
    assert reward(made, f"<answer>{made.answer} or so</answer>", binary=True) == 0.0


def test_task_given_by_name(prompt):
    assert reward(prompt("12"), "12", task="chain_sum") == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>1</answer> no, <answer> 2 </answer>", "2"),
        ("  3\n", "3"),
        ("1 2 <answer>3", "1 2 <answer>3"),
        ("", ""),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


def test_row_without_task_is_an_error_not_a_score(prompt):
    with pytest.raises(ValueError, match=r"no 'source_dataset' in its metadata \(it has \['level'\]\)"):
        reward(prompt(level=1), "1")


def test_unknown_task(prompt):
    with pytest.raises(ValueError, match="has no task 'chain_sums': did you mean 'chain_sum'"):
        reward(prompt(source_dataset="chain_sums"), "1")
