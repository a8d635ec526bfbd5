"""`jobs.data` writes files that the recipes can read, or says what is wrong and exits with 2."""

import json
from pathlib import Path

import pytest

from jobs.data import main

ROWS = Path(__file__).parents[1] / "fixtures" / "gsm8k_rows.jsonl"


def _read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_gsm8k_from_local_files(tmp_path):
    assert main(["gsm8k", "--out", str(tmp_path), "--train-jsonl", str(ROWS), "--test-jsonl", str(ROWS)]) == 0
    rows = _read(tmp_path / "train.jsonl")
    assert len(rows) == len(_read(ROWS))
    assert rows[0] == {"id": "gsm8k-train-0", **_read(ROWS)[0]}
    assert _read(tmp_path / "test.jsonl")[0]["id"] == "gsm8k-test-0"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test.jsonl", "train.jsonl"]


def test_reasoning_gym(tmp_path):
    command = ["reasoning_gym", "--task", "chain_sum", "--out", str(tmp_path), "--train", "30", "--test", "10"]
    assert main([*command, "--set", "min_terms=3", "max_terms=3"]) == 0
    train, test = _read(tmp_path / "train.jsonl"), _read(tmp_path / "test.jsonl")
    assert (len(train), len(test)) == (30, 10)
    assert {row["metadata"]["num_terms"] for row in train} == {3}
    assert len({row["question"] for row in train + test}) == 40
    assert len({row["id"] for row in train + test}) == 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reasoning_gym", "--task", "chain_sums"], "has no task 'chain_sums': did you mean chain_sum"),
        (["reasoning_gym", "--task", "chain_sum", "--set", "max_term=4"], "chain_sum does not take these settings"),
        (["reasoning_gym", "--task", "chain_sum", "--set", "max_terms"], "is not of the form name=value"),
        (
            ["reasoning_gym", "--task", "chain_sum", "--set", "min_terms=1", "max_terms=1", "max_digits=1"],
            "gave only 10 different questions",
        ),
        (["gsm8k", "--train-jsonl", "nowhere.jsonl"], "--train-jsonl nowhere.jsonl does not exist"),
    ],
)
def test_faults_exit_with_2(tmp_path, capsys, arguments, message):
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_rows_that_are_not_gsm8k(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')
    source = str(tmp_path / "a.jsonl")
    assert main(["gsm8k", "--out", str(tmp_path / "out"), "--train-jsonl", source, "--test-jsonl", source]) == 2
    assert "row 1 is not a GSM8K row" in capsys.readouterr().err
