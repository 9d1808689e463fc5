"""Configuration: a mapping or TOML file becomes frozen dataclasses, or one error that says it all.

A component declares its settings as a frozen dataclass; nothing here knows any of them::

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Budget:
        device_nbytes: Nbytes                                  # 536870912 or "512MiB"
        num_buffers: Annotated[int, Within(minimum=1)] = 4
        folder: Path | None = None

Field types: bool, int, float, str, Path, Nbytes, enums (by value), tuples, `X | None`,
`dict[str, X]`, `object` (taken as it is) and further dataclasses. Conversion is strict: text is not
a number, a float is not an int, true is not 1. Paths are made absolute when they are read, relative
to the working directory.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import enum
import math
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from zinf_core.errors import ConfigError, InternalError
from zinf_core.units import parse_nbytes

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Within:
    """Mark of a number's range: ``Annotated[int, Within(minimum=1)]``."""

    minimum: float = -math.inf
    maximum: float = math.inf
    above: float = -math.inf
    """Exclusive lower bound."""
    below: float = math.inf
    """Exclusive upper bound."""

    def complaint(self, value: float) -> str | None:
        """Return what is wrong with `value`, or None."""
        if value < self.minimum:
            return f"must be at least {self.minimum:g}"
        if value > self.maximum:
            return f"must be at most {self.maximum:g}"
        if value <= self.above:
            return f"must be greater than {self.above:g}"
        if value >= self.below:
            return f"must be less than {self.below:g}"
        return None


class _Size:
    """Mark of a size in bytes."""


Nbytes = Annotated[int, _Size]
"""Field type of a size in bytes: an integer, or text such as ``"512MiB"``."""


def load_toml(cls: type[T], path: Path, overrides: Sequence[str] = ()) -> T:
    """Return the `cls` that the TOML file at `path` describes, after `overrides`.

    Raises ConfigError, naming the file, if it cannot be read, is not TOML, or holds a setting that
    is unknown, missing, mistyped or out of range; all of them are reported at once.
    """
    try:
        mapping = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: is not valid TOML: {exc}") from exc
    return from_mapping(cls, override(mapping, overrides), source=str(path))


def override(mapping: Mapping[str, object], overrides: Sequence[str]) -> dict[str, object]:
    """Return a copy of `mapping` with each ``section.key=value`` of `overrides` put in.

    A value is read as TOML; what is not TOML is text, so ``budget.device=512MiB`` needs no quotes.
    Raises ConfigError if a `=` is missing or the path leads through something that is no section.
    """
    result: dict[str, Any] = copy.deepcopy(dict(mapping))
    for text in overrides:
        name, separator, value = text.partition("=")
        parts = [part.strip() for part in name.split(".")]
        if not separator or not all(parts):
            raise ConfigError(f'override {text!r} is not of the form "section.key=value"')
        section = result
        for depth, part in enumerate(parts[:-1], start=1):
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                where = ".".join(parts[:depth])
                raise ConfigError(f"override {text!r}: {where} = {section!r} is not a section")
        section[parts[-1]] = _parse_override(value.strip())
    return result


def from_mapping(
    cls: type[T], mapping: Mapping[str, object], *, source: str = "configuration"
) -> T:
    """Return the `cls` that `mapping` describes, nested dataclasses from nested mappings.

    Raises ConfigError, naming `source` and every setting that is unknown, missing, mistyped or out
    of range by its full path, with the nearest valid name.
    """
    reader = _Reader(cls)
    value = reader.section(cls, mapping, "")
    if reader.problems:
        head = f"{source}: "
        if len(reader.problems) > 1:
            head += f"{len(reader.problems)} problems:\n  "
        raise ConfigError(head + "\n  ".join(reader.problems))
    return typing.cast("T", value)


def _parse_override(text: str) -> object:
    """Return `text` as one TOML value, or itself when it is none."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


class _Invalid(enum.Enum):
    """Stands for a value that could not be converted; the problem is on the list."""

    INVALID = enum.auto()


_INVALID: Final = _Invalid.INVALID


class _Reader:
    """One conversion: walks the mapping beside the types and lists every problem it meets."""

    def __init__(self, root: type) -> None:
        """Start with no problems; `root` is where names are looked up for suggestions."""
        self.problems: list[str] = []
        self._root = root

    def section(self, cls: type, value: object, path: str) -> object:
        """Return the dataclass `cls` from the mapping `value`, or _INVALID."""
        if not isinstance(value, Mapping):
            return self._refuse(path, value, f"is not a section; write [{path}]")
        hints = typing.get_type_hints(cls, include_extras=True)
        fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
        for key in value:
            if key not in fields:
                self._report_unknown(_join(path, str(key)), value[key], fields)
        arguments: dict[str, object] = {}
        for name, field in fields.items():
            if name in value:
                arguments[name] = self._value(hints[name], value[name], _join(path, name))
            elif _is_required(field):
                self.problems.append(f"{_join(path, name)} is missing")
                arguments[name] = _INVALID
        if _INVALID in arguments.values():
            return _INVALID
        try:
            return cls(**arguments)
        except ConfigError as exc:
            self.problems.append(f"[{path}] {exc}" if path else str(exc))
            return _INVALID

    def _value(self, hint: Any, value: object, path: str) -> object:
        """Return `value` converted to the type `hint`, or _INVALID."""
        origin = typing.get_origin(hint)
        arguments = typing.get_args(hint)
        if origin is Annotated:
            return self._marked(arguments, value, path)
        if origin in (typing.Union, types.UnionType):
            return self._optional(arguments, value, path)
        if origin is tuple:
            return self._tuple(arguments, value, path)
        if origin is dict:
            return self._dict(arguments[1], value, path)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return self.section(hint, value, path)
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return self._enum(hint, value, path)
        return self._scalar(hint, value, path)

    def _marked(self, arguments: tuple[Any, ...], value: object, path: str) -> object:
        """Return a value whose type carries marks: a size, or a range."""
        hint, *marks = arguments
        if _Size in marks:
            try:
                converted: object = parse_nbytes(typing.cast("int | str", value), what=path)
            except ConfigError as exc:
                self.problems.append(str(exc))
                return _INVALID
        else:
            converted = self._value(hint, value, path)
        for mark in marks:
            if isinstance(mark, Within) and isinstance(converted, int | float):
                complaint = mark.complaint(converted)
                if complaint is not None:
                    return self._refuse(path, value, complaint)
        return converted

    def _optional(self, arguments: tuple[Any, ...], value: object, path: str) -> object:
        """Return None, or a value of the one other type."""
        others = [argument for argument in arguments if argument is not types.NoneType]
        if len(others) != 1:
            raise InternalError(f"{path}: a setting has one type, besides None")
        return None if value is None else self._value(others[0], value, path)

    def _tuple(self, arguments: tuple[Any, ...], value: object, path: str) -> object:
        """Return a tuple of the right length from a list."""
        if not isinstance(value, list | tuple):
            return self._refuse(path, value, "is not a list")
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            hints: Sequence[Any] = [arguments[0]] * len(value)
        else:
            hints = arguments
        if len(hints) != len(value):
            return self._refuse(path, value, f"needs {len(hints)} items, not {len(value)}")
        items = [
            self._value(hint, item, f"{path}[{index}]")
            for index, (hint, item) in enumerate(zip(hints, value, strict=True))
        ]
        return _INVALID if _INVALID in items else tuple(items)

    def _dict(self, hint: Any, value: object, path: str) -> object:
        """Return a dictionary with free names and values of one type."""
        if not isinstance(value, Mapping):
            return self._refuse(path, value, f"is not a section; write [{path}]")
        items = {key: self._value(hint, item, _join(path, key)) for key, item in value.items()}
        return _INVALID if any(item is _INVALID for item in items.values()) else items

    def _enum(self, hint: type[enum.Enum], value: object, path: str) -> object:
        """Return the member whose value is `value`."""
        for member in hint:
            if member.value == value and type(member.value) is type(value):
                return member
        choices = [str(member.value) for member in hint]
        return self._refuse(path, value, f"is not one of {', '.join(choices)}")

    def _scalar(self, hint: Any, value: object, path: str) -> object:
        """Return a bool, int, float, str or Path, or anything where `object` is asked for."""
        if hint is object:
            return value
        if hint is Path:
            return self._path(value, path)
        if hint is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if hint not in (bool, int, float, str):
            raise InternalError(f"{path}: zinf_core.config does not know the type {hint!r}")
        if type(value) is not hint:
            kind = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
            return self._refuse(path, value, f"is not {kind[hint]}")
        if isinstance(value, float) and not math.isfinite(value):
            return self._refuse(path, value, "is not a finite number")
        return value

    def _path(self, value: object, path: str) -> object:
        """Return an absolute path; ``~`` is the home folder."""
        if isinstance(value, Path):
            return value.expanduser().absolute()
        if not isinstance(value, str) or not value or "\0" in value:
            return self._refuse(path, value, "is not a path")
        return Path(value).expanduser().absolute()

    def _refuse(self, path: str, value: object, complaint: str) -> _Invalid:
        """List one problem."""
        self.problems.append(f"{path} = {value!r} {complaint}")
        return _INVALID

    def _report_unknown(self, path: str, value: object, fields: Mapping[str, object]) -> None:
        """List a key that no field has, with the nearest name that one has."""
        prefix, _, name = path.rpartition(".")
        near = [known for known in _setting_paths(self._root, "") if _last(known) == name]
        near += [_join(prefix, match) for match in difflib.get_close_matches(name, fields, n=1)]
        hint = f"did you mean {near[0]}?" if near else f"valid here: {', '.join(sorted(fields))}"
        self.problems.append(f"{path} = {value!r} is not a known setting; {hint}")


def _setting_paths(cls: type, prefix: str) -> Iterator[str]:
    """Iterate over the full paths of all settings under `cls`."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        path = _join(prefix, field.name)
        yield path
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _setting_paths(hints[field.name], path)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    """Return whether a field has no default of either kind."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _join(prefix: str, name: str) -> str:
    """Return the path of `name` inside the section `prefix`."""
    return f"{prefix}.{name}" if prefix else name


def _last(path: str) -> str:
    """Return the last name of a path."""
    return path.rpartition(".")[2]
