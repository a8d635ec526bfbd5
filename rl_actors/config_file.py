"""Read a recipe: YAML plus `section.key=value` overrides, with the nearest right name for a wrong one."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from rl_actors.config import RunConfig
from rl_actors.errors import ConfigError, shown
from rl_actors.paths import given_path


class _Yaml(yaml.SafeLoader):
    """YAML as people mean it, which is 1.2: `off` is a word and 1e-4 is a number (PyYAML 6 reads 1.1)."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own class attribute
        first: [pair for pair in pairs if first not in "yYnNoO" or pair[0] != "tag:yaml.org,2002:bool"]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """A key that stands twice is refused: PyYAML silently takes the last."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
            if name in seen:
                raise yaml.composer.ComposerError(None, None, f"the key {key.value!r} stands twice", key.start_mark)
            if name:
                seen.add(name)
        return node


_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """Read `path`, apply `overrides` such as "trainer.ep=2" (values are YAML), and validate.

    Raises:
        ConfigError: one sentence for each fault: what, where, and what to write instead.
    """
    path = given_path(str(path))
    if not path.is_file():
        raise ConfigError(f"configuration {path} is not a file: give a recipe such as jobs/configs/quickstart.yaml")
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration {path} is not valid YAML: byte {error.start} is not UTF-8") from error
    except OSError as error:
        raise ConfigError(f"configuration {path} cannot be read: {error.strerror}") from error
    tree = _read_yaml(text, f"configuration {path} is")
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"configuration {path} holds a {type(tree).__name__}: write `section:` with `key: value` under it"
        )
    for override in overrides:
        _apply_override(tree, override)
    return parse_config(tree, str(path))


def parse_config(tree: dict[str, Any], source: str) -> RunConfig:
    """Validate a plain dictionary; `source` names it in error messages."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(fault, source) for fault in error.errors())) from error


def dump_config(config: RunConfig) -> str:
    """The whole configuration as YAML, defaults included, to be kept beside a run."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _apply_override(tree: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r} is not of the form section.key=value, such as trainer.ep=2")
    value = _read_yaml(text, f"override {shown(override)}: the value is")
    for depth, key in enumerate(keys[:-1], start=1):
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"override {override!r}: {'.'.join(keys[:depth])} is a value, not a section")
    tree[keys[-1]] = value


def _read_yaml(text: str, what: str) -> Any:
    try:
        return yaml.load(text, _Yaml)
    except Exception as error:  # a value such as 2020-13-45 raises whatever its Python type raises
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise ConfigError(f"{what} not valid YAML: {reason or type(error).__name__}") from error


def _explain(fault: Any, source: str) -> str:
    location = [str(part) for part in fault["loc"]]
    where = ".".join(location) or "the configuration"
    if fault["type"] == "extra_forbidden":
        near = _nearest_key(location)
        return f"unknown key {shown(where)} in {source}" + (f": did you mean {near!r}?" if near else "")
    if fault["type"] == "missing":
        return f"{source} needs a value for {where!r}"
    message = " ".join(fault["msg"].removeprefix("Value error, ").split())
    if not location:
        return f"{source}: {message}"
    return f"{source}: {where} = {shown(fault['input'])} cannot be used: {message[0].lower()}{message[1:]}"


def _nearest_key(location: list[str]) -> str | None:
    """The known dotted key most like a wrong one: a sibling first, then any key of any section."""
    section: type[BaseModel] | None = RunConfig
    for part in location[:-1]:
        annotation = section.model_fields[part].annotation if section and part in section.model_fields else None
        section = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
    if section and (near := difflib.get_close_matches(location[-1], section.model_fields, n=1)):
        return ".".join([*location[:-1], near[0]])
    every = _dotted_keys(RunConfig)
    by_leaf = [key for key in every if key.rpartition(".")[2] == location[-1]]
    near = by_leaf or difflib.get_close_matches(".".join(location), every, n=1)
    return near[0] if near else None


def _dotted_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, info in section.model_fields.items():
        keys.append(prefix + name)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            keys += _dotted_keys(info.annotation, f"{prefix}{name}.")
    return keys
