"""The final number of an answer, in all the ways people and models write numbers."""

import json
import os
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from rl_actors.rewards.gsm8k import final_number, reference_number, reward
from rl_actors.types import Prompt

TESTS = Path(__file__).parents[1]
FEW_ROWS = TESTS / "fixtures" / "gsm8k_rows.jsonl"
ALL_ROWS = Path(os.environ.get("RL_ACTORS_GSM8K", TESTS.parents[1] / "shared" / "data" / "gsm8k"))


def prompt(answer):
    return Prompt("p", np.zeros(1, np.int32), "?", answer)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5 + 3 = 8\n#### 8", "8"),
        ("#### 1,080", "1080"),
        ("#### 109,200,000", "109200000"),
        ("#### -10", "-10"),
        ("#### \u221210", "-10"),
        ("####18 dollars and 5 cents", "18"),
        ("#### 3\n#### 4", "4"),
        ("so \\boxed{42}. That took 3 steps.", "42"),
        ("\\boxed{\\$1{,}000}", "1000"),
        ("\\boxed{\\frac{1}{2}", None),
        ("She earns $18.", "18"),
        ("She earns $-5", "-5"),
        ("a loss of -$1,200.50", "-1200.50"),
        ("that is 50%", "50"),
        ("5-3", "3"),
        ("(2)-1", "1"),
        ("it is .5", ".5"),
        ("one of 1,2,3", "3"),
        ("10.0", "10"),
        ("no number", None),
        ("", None),
    ],
)
def test_final_number(text, number):
    if text.startswith("\\boxed{\\frac"):  # an open brace: not boxed, so the last number counts
        number = "2"
    assert final_number(text) == (None if number is None else Decimal(number))


def test_marker_beats_box_beats_last_number():
    assert final_number("#### 1 \\boxed{2} 3") == 1
    assert final_number("\\boxed{2} 3") == 2


def test_strict_wants_a_marker_or_a_box():
    assert reward(prompt("#### 8"), "8") == 1.0
    assert reward(prompt("#### 8"), "8", strict=True) == 0.0
    assert reward(prompt("#### 8"), "#### 8.00", strict=True) == 1.0


def test_scores():
    assert reward(prompt("2 * 9 = <<2*9=18>>18\n#### 18"), "The answer is 18.") == 1.0
    assert reward(prompt("2 * 9 = <<2*9=18>>18\n#### 18"), "The answer is 19.") == 0.0
    assert reward(prompt("18"), "#### 18") == 1.0
    assert reward(prompt(18), "#### 18") == 1.0
    assert reward(prompt("#### 18"), "") == 0.0


def test_data_without_a_number_is_an_error_not_a_score():
    with pytest.raises(ValueError, match="holds no number"):
        reward(prompt("Paris"), "18")


def _expected(answer):
    return Decimal(answer.rpartition("####")[2].strip().replace(",", ""))


def _read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_real_rows():
    rows = _read(FEW_ROWS)
    assert len(rows) == 8
    for row in rows:
        assert reference_number(row["answer"]) == _expected(row["answer"])
        assert reward(prompt(row["answer"]), row["answer"]) == 1.0


@pytest.mark.skipif(not ALL_ROWS.is_dir(), reason="set RL_ACTORS_GSM8K to the folder of train.jsonl and test.jsonl")
@pytest.mark.parametrize(("split", "count"), [("train", 7473), ("test", 1319)])
def test_every_row_of_the_dataset(split, count):
    rows = _read(ALL_ROWS / f"{split}.jsonl")
    assert len(rows) == count
    wrong = [row for row in rows if reference_number(row["answer"]) != _expected(row["answer"])]
    assert not wrong
