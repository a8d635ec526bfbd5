"""Every form of dataset gives the same rows; every fault is one sentence that says where."""

import json
import sys
import time

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from rl_actors.data.rows import read_rows
from rl_actors.errors import ConfigError

ROWS = [{"question": "one\u2028two?", "answer": "1"}, {"question": "two", "answer": "2"}]


def _as_jsonl(folder):
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n\n", encoding="utf-8")
    return path


def _as_json(folder):
    path = folder / "rows.json"
    path.write_text("\ufeff" + json.dumps(ROWS), encoding="utf-8")
    return path


def _as_parquet(folder):
    path = folder / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path


def _as_saved_dataset(folder):
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "saved")
    return folder / "saved"


def _as_saved_splits(folder):
    splits = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    datasets.DatasetDict(splits).save_to_disk(folder / "splits")
    return folder / "splits"


@pytest.mark.parametrize("write", [_as_jsonl, _as_json, _as_parquet, _as_saved_dataset, _as_saved_splits])
def test_every_form_gives_the_same_rows(tmp_path, write):
    assert read_rows(str(write(tmp_path)), "train") == ROWS


def test_split_of_a_saved_dataset(tmp_path):
    folder = str(_as_saved_splits(tmp_path))
    assert read_rows(folder, "test") == ROWS[:1]
    with pytest.raises(ConfigError, match="no split 'dev'; its splits are test, train"):
        read_rows(folder, "dev")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"q": 1}\n{"q": \n', "a.jsonl: line 2 is not valid JSON"),
        ("a.jsonl", '{"q": 1}\n[1]\n', "a.jsonl: line 2 holds a list"),
        ("a.jsonl", "\n\n", "has no rows"),
        ("a.json", "", "has no rows"),
        ("a.json", "[]", "has no rows"),
        ("a.json", '{"q": 1}', "holds a dict: write a list of objects"),
        ("a.json", '[{"q": 1}, 2]', "row 2 holds a int"),
        ("a.json", '{"q": 1}\n{"q": 2}\n', "line 2 is not valid JSON .*rename the file"),
        ("a.txt", "hello", "is not a .json, .jsonl or .parquet file"),
        ("a.jsonl", '{"q": 1}\n' + "[" * 100_000, "a.jsonl: line 2 cannot be used .it is nested too deeply"),
        ("a.jsonl", '{"q": ' + "9" * 5000 + "}", "line 1 cannot be used .a number has too many digits"),
        ("a.json", "[" * 100_000, "a.json cannot be used .it is nested too deeply"),
        ("a.json", '[{"q": ' + "9" * 5000 + "}]", "a.json cannot be used .a number has too many digits"),
        ("a.parquet", "hello", "is not a readable parquet file"),
    ],
)
def test_faults_in_a_file(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_rows(str(tmp_path / name), "train")


def test_text_that_is_not_utf8(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"q": "\xff"}')
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_rows(str(tmp_path / "a.jsonl"), "train")


def test_missing_file_names_what_is_there(tmp_path):
    _as_jsonl(tmp_path)
    with pytest.raises(ConfigError, match=r"data\.eval .*row\.jsonl does not exist: in .* there is rows\.jsonl"):
        read_rows(str(tmp_path / "row.jsonl"), "train", "data.eval")


def test_missing_file_under_an_existing_folder_is_not_looked_up_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="data/train does not exist"):
        read_rows("data/train", "train")


@pytest.mark.parametrize("source", ["a\0b", "x" * 5000, "~nouser-of-this-name/x.jsonl", "\ud800.jsonl"])
def test_impossible_path(source):
    with pytest.raises(ConfigError, match=r"path .* cannot be used"):
        read_rows(source, "train")


def test_folder_that_is_no_dataset(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it takes long
    _as_jsonl(tmp_path)
    with pytest.raises(ConfigError, match=r"not a saved dataset: give one of its files, such as rows\.jsonl"):
        read_rows(str(tmp_path), "train")


def test_dataset_name_without_a_network_fails_soon(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://127.0.0.1:9")
    for variable in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"no-such-owner/no-such-data is not a file here and could not be loaded"):
        read_rows("no-such-owner/no-such-data", "train")
    assert time.monotonic() - started < 10.0
