"""Equal expressions score 1 however they are written, and unequal ones 0 however close they look."""

import time

import numpy as np
import pytest

from rl_actors.rewards.math import equivalent, final_expression, reward
from rl_actors.types import Prompt

EQUAL = [
    (r"\frac{1}{2}", "0.5"),
    (r"\dfrac12", r"\frac{1}{2}"),
    (r"\frac{\frac{1}{2}}{3}", "1/6"),
    (r"1\frac12", "1.5"),
    (r"\sqrt{8}", r"2\sqrt2"),
    (r"\sqrt[3]{8}", "2"),
    (r"\pi r^2", r"r^2 \pi"),
    (r"e^{i\pi}", "-1"),
    ("2x+1", "1+2x"),
    ("x^2-1", "(x-1)(x+1)"),
    ("6 - 5i", "-5i+6"),
    ("|x|", "|x|"),
    ("10^{-3}", "0.001"),
    ("(1, 2)", "(1,2)"),
    (r"[0, \frac12)", "[0,0.5)"),
    (r"(-\infty, 2]", r"(-\infty,2]"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("3,-1", "-1,3"),
    ("1,000", "1000"),
    ("x=5", "5"),
    (r"5\text{ cm}", "5"),
    (r"90^\circ", "90"),
    (r"\$5.00", "5"),
    (r"50\%", "50"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
]
DIFFERENT = [
    ("0.5", "0.51"),
    ("x", "y"),
    ("x+1", "x-1"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "1,2"),
    ("[0,1)", "(0,1)"),
    ("1", "1,1"),
    ("1,1,2", "1,2,2"),
    ("2^{100}", "2^{100}-1"),
    ("1267650600228229401496703205376", "1267650600228229401496703205375"),
    ("Evelyn", "Evan"),
    ("", "0"),
    ("1/0", "1"),
]
HOSTILE = [
    "__import__('os').getcwd()",
    "9**9**9**9**9",
    "9" * 5000,
    "(" * 3000,
    r"\frac{" * 200,
    "x.real",
    "1if 1else 2",
]


@pytest.mark.parametrize(("left", "right"), EQUAL)
def test_equal(left, right):
    assert equivalent(left, right)
    assert equivalent(right, left)


@pytest.mark.parametrize(("left", "right"), DIFFERENT)
def test_different(left, right):
    assert not equivalent(left, right)
    assert not equivalent(right, left)


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_is_executed_or_takes_long(text):
    started = time.process_time()
    assert not equivalent(text, "1")
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        (r"so \boxed{1} and \boxed{\frac{1}{2}} ok", r"\frac{1}{2}"),
        ("The answer is 5.", "5"),
        ("Answer: 3\nbecause", "3"),
        ("first\n 7 ", "7"),
        ("", None),
    ],
)
def test_final_expression(text, expression):
    assert final_expression(text) == expression


def test_scores():
    row = Prompt("p", np.zeros(1, np.int32), "?", r"We get \boxed{\frac{3}{4}}")
    assert reward(row, r"\boxed{0.75}") == 1.0
    assert reward(row, "The answer is 3/4") == 1.0
    assert reward(row, "The answer is 3/4", boxed_only=True) == 0.0
    assert reward(row, "") == 0.0


def test_missing_reference_is_an_error_not_a_score():
    with pytest.raises(ValueError, match="no reference answer"):
        reward(Prompt("p", np.zeros(1, np.int32), "?", None), "1")
