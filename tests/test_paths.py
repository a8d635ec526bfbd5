"""A path that no system could have is one sentence that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_actors.errors import ConfigError
from rl_actors.paths import input_path, output_path


@pytest.mark.parametrize("place", [input_path, output_path])
@pytest.mark.parametrize(
    "path", ["a\0b", "x" * 5000, "x" * 300, "~nouser-of-this-name/x", "loop/x", "\ud800", "\udc80"]
)
def test_impossible_paths(place, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match=r"path .* cannot be used") as caught:
        place(path)
    str(caught.value).encode()
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("place", [input_path, output_path])
def test_what_is_not_there_yet_is_below_here(place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RL_ACTORS_HOME", raising=False)
    assert place("a/b") == (tmp_path / "a" / "b").resolve()
