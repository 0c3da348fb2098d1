"""Run files: a dataclass from YAML, overridden with dotted names, checked, and written back as it was resolved."""

import dataclasses
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import yaml

from mhar.errors import ConfigurationError, nearest


class Dataclass(Protocol):
    """Any dataclass instance."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


T = TypeVar("T", bound=Dataclass)


class _Loader(yaml.SafeLoader):
    """YAML with two repairs: a key written twice is an error, and `1e-3` is a number (YAML 1.1 wants `1.0e-3`)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        if repeated := sorted({str(key) for key in keys if keys.count(key) > 1}):
            raise ConfigurationError(f"{node.start_mark.name}: {', '.join(repeated)} given twice in one section")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def load(cls: type[T], path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()) -> T:
    """Build `cls` from the YAML file at `path` (None: all defaults) and overrides such as `optimizer.lr=3e-4`.

    Values of overrides are read as YAML (`data.train=[a, b]`, `eval.every=null`); a leading `--` is accepted.
    Raises ConfigurationError for an unknown key (with the nearest valid one), a wrong type, or a missing field.
    """
    values = read_yaml(path) if path is not None else {}
    for text in overrides:
        name, separator, value = text.removeprefix("--").partition("=")
        if not separator or not name:
            raise ConfigurationError(f"an override is written name=value, received {text!r}")
        _set(values, name, _parse(value, text))
    return from_mapping(cls, values)


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping in a YAML file; ConfigurationError when it is missing, malformed or no mapping."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot read the run file {os.fspath(path)}: {error.strerror}") from error
    values = _parse(text, os.fspath(path))
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigurationError(f"{os.fspath(path)}: a run file is a mapping of names to values")
    return values


def from_mapping(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Build the dataclass `cls` from plain values, nested mappings becoming nested dataclasses; `where` is the
    dotted name of the section, for messages."""
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in values:
        if key not in fields:
            name = f"{where}.{key}" if where else str(key)
            raise ConfigurationError(f"unknown key {name!r}{nearest(key, fields)}")
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise ConfigurationError(f"{f'{where}.' if where else ''}{name} has no default and must be given")
    return cls(**{k: _convert(hints[k], v, f"{where}.{k}" if where else str(k)) for k, v in values.items()})


def to_mapping(config: Dataclass) -> dict[str, Any]:
    """The inverse of `from_mapping`: plain values only (paths as strings, tuples as lists)."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config) if field.init}


def save(config: Dataclass, path: str | os.PathLike[str]) -> None:
    """Write the resolved configuration as YAML, atomically; `load` reads it back to an equal object."""
    write_atomically(path, yaml.safe_dump(to_mapping(config), sort_keys=False, allow_unicode=True))


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file so that a reader or a crash sees the old content or the new, never a part of it."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def describe(cls: type[Dataclass], prefix: str = "") -> list[str]:
    """One line for each dotted name that a run file of type `cls` may hold: name, type and default."""
    lines: list[str] = []
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name, kind = f"{prefix}{field.name}", hints[field.name]
        if dataclasses.is_dataclass(kind):
            lines += describe(typing.cast("type[Dataclass]", kind), f"{name}.")
        else:
            lines.append(f"{name}: {_type_name(kind)}{_default_text(field)}")
    return lines


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{source}: not valid YAML: {error}") from error


def _set(values: dict[str, Any], name: str, value: Any) -> None:
    *sections, last = name.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigurationError(f"{name}: {section!r} is a value, not a section")
        values = inner
    values[last] = value


def _convert(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(kind, value, where)
    if origin is typing.Literal:
        if value not in arguments:
            raise ConfigurationError(f"{where}: unknown value {value!r}{nearest(value, map(str, arguments))}")
        return value
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return from_mapping(typing.cast("type[Dataclass]", kind), value, where)
    if origin in (list, tuple) and isinstance(value, list | tuple):
        return origin(_convert(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, Mapping):
        return {str(key): _convert(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    return _convert_scalar(kind, value, where)


def _convert_union(kind: Any, value: Any, where: str) -> Any:
    options = typing.get_args(kind)
    if value is None and types.NoneType in options:
        return None
    options = [option for option in options if option is not types.NoneType]
    if len(options) == 1:
        return _convert(options[0], value, where)
    for option in options:
        try:
            return _convert(option, value, where)
        except ConfigurationError:
            continue
    raise _mismatch(kind, value, where)


def _convert_scalar(kind: Any, value: Any, where: str) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float and number:
        return float(value)
    if kind is int and number and (isinstance(value, int) or value.is_integer()):
        return int(value)
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    if kind in (bool, str) and isinstance(value, kind):
        return value
    raise _mismatch(kind, value, where)


def _mismatch(kind: Any, value: Any, where: str) -> ConfigurationError:
    return ConfigurationError(f"{where}: expected {_type_name(kind)}, received {value!r}")


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind).replace("typing.", "")


def _default_text(field: "dataclasses.Field[Any]") -> str:
    if field.default is not dataclasses.MISSING:
        return f" = {_plain(field.default)!r}"
    if field.default_factory is not dataclasses.MISSING:
        return f" = {_plain(field.default_factory())!r}"
    return " (required)"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_mapping(typing.cast(Dataclass, value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, Path) else value
