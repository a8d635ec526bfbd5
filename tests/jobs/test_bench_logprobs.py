"""The benchmark of log-probabilities measures two ways that agree."""

from __future__ import annotations

import json

import pytest

from jobs.bench.logprobs import main


def test_both_ways_are_measured_and_agree(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--tokens=40", "--vocabulary=300", "--hidden=32", "--chunk=16", "--repeats=2", "--temperature=0.7"]
    assert main(["--device=cpu", "--json", *sizes]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["name"] for row in result["rows"][:2]] == ["plain", "chunks"]
    for row in result["rows"]:
        assert row["seconds"] > 0
        assert max(row["logprob_error"], row["logprob_difference"], row["entropy_difference"]) < 1e-5
        assert row["gradient_difference"] is None or row["gradient_difference"] < 1e-5
    assert result["time_ratio"] == pytest.approx(result["rows"][1]["seconds"] / result["rows"][0]["seconds"])


def test_sizes_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--tokens=-1"])
    assert "at least 1" in capsys.readouterr().err
