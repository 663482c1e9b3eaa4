"""Configuration as frozen dataclasses: strict JSON in and out, overrides by name, fingerprints."""

import ast
import contextlib
import dataclasses
import difflib
import hashlib
import inspect
import itertools
import json
import math
import numbers
import operator
import reprlib
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal, TypeVar, Union

T = TypeVar("T")
C = TypeVar("C", bound=type)
V = TypeVar("V", bound="Variant")


class UserError(ValueError):
    """A mistake its user can mend: says what, where and what to do, in one or two plain lines.

    The command line prints it without a traceback and exits with code 2; any other exception is a
    bug of ours and keeps its traceback.
    """


class _FieldTexts(str):
    """The docstring of a dataclass, and the texts below its fields, which Python itself drops.

    They are read from the source whenever someone asks, so that imports take no longer.
    """

    __slots__ = ()

    def __get__(self, config: object, cls: type[Any]) -> str:
        texts: dict[str, str] = {}
        for base in reversed(cls.__mro__):
            # without its source there is the docstring alone
            with contextlib.suppress(OSError, TypeError, SyntaxError):
                texts |= _texts_below(base) if "__dataclass_fields__" in vars(base) else {}
        names = [field.name for field in dataclasses.fields(cls) if field.name in texts]
        if not names:
            return self
        lines = [f"{name}: {texts[name]}".replace("\n", "\n" + " " * 8) for name in names]
        return "\n    ".join([f"{inspect.cleandoc(self)}\n\nAttributes:", *lines])


def _texts_below(cls: type) -> dict[str, str]:
    """The string below each annotated name of a class that has one."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, below in itertools.pairwise(tree.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                found[name] = inspect.cleandoc(text)
    return found


def documented(cls: C) -> C:
    """Let `help` show the strings below the fields of a dataclass (of an ABC it does not)."""
    cls.__doc__ = _FieldTexts(cls.__doc__ or "")
    return cls


class Variant:
    """Base of configuration families whose members are told apart in JSON by their `type`.

    A class that names `Variant` directly as a base opens a family; its subclasses join it by
    `@register("name")`.
    """

    type_name: ClassVar[str]
    _members: ClassVar[dict[str, type["Variant"]]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if Variant in cls.__bases__:
            cls._members = {}


def register(name: str) -> Callable[[type[V]], type[V]]:
    """Enter a configuration class into its family under `name`, `documented`."""

    def enter(cls: type[V]) -> type[V]:
        assert name not in cls._members, f"{name!r} is registered twice"
        cls.type_name = name
        cls._members[name] = cls
        return documented(cls)

    return enter


def variants(family: Callable[..., V]) -> dict[str, type[V]]:
    """Members of a family by name, in the order of registration."""
    assert isinstance(family, type)
    assert issubclass(family, Variant)
    return typing.cast(dict[str, type[V]], dict(family._members))


def suggestion(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` where a known word is close, else an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def require_whole(name: str, value: object, least: int, most: int | None = None) -> int:
    """A whole number as an int, whatever type counts it (numpy's too).

    Raises:
        UserError: Not a whole number, below `least` or above `most`.
    """
    whole = _whole(value)
    if whole is None or whole < least or (most is not None and whole > most):
        limit = "" if most is None else f" and at most {most}"
        raise UserError(f"{name} must be a whole number of at least {least}{limit}, got {value!r}")
    return whole


def settle(config: Any) -> None:
    """Check the scalar fields of a frozen dataclass, and give their values Python's own types.

    Whole numbers (numpy's too) become ints and others floats, as their fields are declared, so that
    equal configurations have equal JSON and names. Called first of all in `__post_init__`.

    Raises:
        UserError: A value of another kind than its field, or none of its choices.
    """
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        hint, value = hints[field.name], getattr(config, field.name)
        is_union = typing.get_origin(hint) in (Union, types.UnionType)
        kinds = typing.get_args(hint) if is_union else (hint,)
        some = [kind for kind in kinds if kind is not type(None)]
        # where there are several kinds, their class chooses
        if len(some) == 1 and not (value is None and some != list(kinds)):
            object.__setattr__(config, field.name, _settled(field.name, some[0], value))


def _settled(name: str, hint: Any, value: Any) -> Any:
    if typing.get_origin(hint) is Literal:
        if value not in typing.get_args(hint):
            *others, last = map(repr, typing.get_args(hint))
            raise UserError(f"{name} must be {', '.join(others)} or {last}, got {value!r}")
    elif hint is int:
        whole = _whole(value)
        if whole is None:
            raise UserError(f"{name} must be a whole number, got {value!r}")
        return whole
    elif hint is float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise UserError(f"{name} must be a number, got {value!r}")
        with contextlib.suppress(OverflowError):
            return float(value)
        raise UserError(f"{name} must be a finite number, got {_shown(value)}")
    elif hint is not Any and isinstance(hint, type) and not isinstance(value, hint):
        words = {bool: "True or False", str: "text"}
        raise UserError(f"{name} must be {words.get(hint, f'a {hint.__name__}')}, got {value!r}")
    return value


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def to_dict(config: Any) -> Any:
    """Plain JSON values of a configuration: dataclasses become objects, tuples lists."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        fields = {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
        return {"type": config.type_name, **fields} if isinstance(config, Variant) else fields
    if isinstance(config, tuple | list):
        return [to_dict(item) for item in config]
    if config is None or isinstance(config, bool | int | float | str):
        return config
    raise TypeError(f"{type(config).__name__} is not a configuration value")


def from_defaults(config: Any) -> dict[str, Any]:
    """JSON values of the fields of a configuration that are not at their default."""
    changed: dict[str, Any] = {}
    if isinstance(config, Variant):
        changed["type"] = config.type_name
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.default is not dataclasses.MISSING and value == field.default:
            continue
        is_nested = dataclasses.is_dataclass(value) and not isinstance(value, type)
        changed[field.name] = from_defaults(value) if is_nested else to_dict(value)
    return changed


def from_dict(cls: type[T], data: Any, *, where: str = "configuration") -> T:
    """Build `cls` from JSON values, strictly.

    Fields that `data` leaves out take their defaults, so files written before a field existed
    still load. `where` names the place in error messages.

    Raises:
        UserError: An unknown or missing field, or a value of the wrong type.
    """
    return typing.cast(T, _read(cls, data, where))


def with_overrides(config: T, overrides: Mapping[str, str]) -> T:
    """Replace fields named by dotted paths, such as `{"residual.rho_max": "1"}`.

    Values are read as JSON where they parse (`1`, `true`, `null`, `["split"]`), else as text.

    Raises:
        UserError: A path that names no field, or a value its field does not take.
    """
    data = to_dict(config)
    for path, text in overrides.items():
        *parents, last = path.split(".")
        node: Any = data
        for parent in parents:
            node = _child(node, parent, path, data)
        _child(node, last, path, data)
        # Python's spelling of these is meant as JSON's
        plain = {"True": "true", "False": "false", "None": "null"}.get(text, text)
        try:
            node[last] = json.loads(plain)
        except (ValueError, RecursionError):
            node[last] = text
    try:
        return from_dict(type(config), data, where="--set")
    except UserError as error:
        # a rule that fields break together names them itself, wherever they were given
        raise UserError(str(error).removeprefix("--set: ")) from None


def differences(old: Any, new: Any, *, path: str = "") -> list[str]:
    """Dotted names of the fields in which two configurations (or their JSON values) differ."""
    if not isinstance(old, dict | list):
        old = to_dict(old)
    if not isinstance(new, dict | list):
        new = to_dict(new)
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [] if old == new else [path]
    names: list[str] = []
    for key in dict.fromkeys([*old, *new]):
        dotted = f"{path}.{key}" if path else key
        if key not in old or key not in new:
            names.append(dotted)
        elif isinstance(old[key], dict) and isinstance(new[key], dict):
            names += differences(old[key], new[key], path=dotted)
        elif old[key] != new[key]:
            names.append(dotted)
    return names


def fingerprint(config: Any) -> str:
    """Eight hexadecimal digits that change with any value of a configuration or JSON value."""
    data = config if isinstance(config, dict | list) else to_dict(config)
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _child(node: Any, name: str, path: str, root: Any) -> Any:
    if not isinstance(node, dict) or name not in node or name == "type":
        known = [key for key in node if key != "type"] if isinstance(node, dict) else []
        elsewhere = [p for p in _paths(root) if name and p.endswith(f".{name}")]
        close = suggestion(elsewhere[0], elsewhere) if elsewhere else suggestion(name, known)
        listed = f"; it has {', '.join(known)}" if known and not close else ""
        raise UserError(f"--set {path}: no field {name!r}{close}{listed}")
    return node[name]


def _paths(node: Any, prefix: str = "") -> list[str]:
    """Dotted names of every field below a JSON value, types left out."""
    if not isinstance(node, dict):
        return []
    names = [key for key in node if key != "type"]
    return [
        *(f"{prefix}{key}" for key in names),
        *(path for key in names for path in _paths(node[key], f"{prefix}{key}.")),
    ]


def _read(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _read_union(typing.get_args(hint), value, where)
    if origin is Literal:
        if value not in typing.get_args(hint):
            allowed = ", ".join(repr(choice) for choice in typing.get_args(hint))
            raise UserError(f"{where}: {_shown(value)} is not one of {allowed}")
        return value
    if origin is tuple:
        return _read_tuple(typing.get_args(hint), value, where)
    if isinstance(hint, type) and issubclass(hint, Variant):
        return _read_variant(hint, value, where)
    if dataclasses.is_dataclass(hint):
        return _read_fields(hint, value, where)
    return _read_scalar(hint, value, where)


def _read_union(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in choices:
        return None
    errors = []
    for choice in choices:
        if choice is type(None):
            continue
        try:
            return _read(choice, value, where)
        except UserError as error:
            errors.append(error)
    raise errors[0]


def _read_tuple(items: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise UserError(f"{where}: needs a list, got {_shown(value)}")
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(_read(items[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if len(value) != len(items):
        raise UserError(f"{where}: needs {len(items)} values, got {len(value)}")
    return tuple(
        _read(hint, item, f"{where}[{i}]")
        for i, (hint, item) in enumerate(zip(items, value, strict=True))
    )


def _read_variant(family: type[Variant], value: Any, where: str) -> Any:
    if not isinstance(value, dict) or "type" not in value:
        raise UserError(f"{where}: needs an object with a 'type', got {_shown(value)}")
    name = value["type"]
    member = family._members.get(name) if isinstance(name, str) else None
    if member is None or not issubclass(member, family):
        known = ", ".join(family._members)
        raise UserError(
            f"{where}: unknown type {_shown(name)}{suggestion(str(name), family._members)}; "
            f"known: {known}"
        )
    return _read_fields(member, {k: v for k, v in value.items() if k != "type"}, where)


def _read_fields(cls: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise UserError(f"{where}: needs an object, got {_shown(value)}")
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    for name in value:
        if name not in fields:
            raise UserError(f"{where}: unknown field {name!r}{suggestion(name, fields)}")
    hints = typing.get_type_hints(cls)
    arguments = {}
    for name, field in fields.items():
        if name in value:
            arguments[name] = _read(hints[name], value[name], _within(where, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UserError(f"{where}: the field {name!r} is missing")
    try:
        return cls(**arguments)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _read_scalar(hint: Any, value: Any, where: str) -> Any:
    assert hint in (bool, int, float, str), f"{hint} cannot be read from JSON"
    if hint is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise UserError(f"{where}: needs a finite number, got {_shown(value)}") from None
    if type(value) is not hint:
        words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
        raise UserError(f"{where}: needs {words[hint]}, got {_shown(value)}")
    if hint is float and not math.isfinite(value):
        raise UserError(f"{where}: needs a finite number, got {value!r}")
    return value


def _within(where: str, name: str) -> str:
    # after an option's name its key follows as people write it
    return f"{where} {name}" if where.startswith("--") and " " not in where else f"{where}.{name}"


def _shown(value: Any) -> str:
    """A value as errors quote it: on one line, and not longer than a line."""
    shorten = reprlib.Repr()
    shorten.maxstring = shorten.maxother = shorten.maxlong = 60
    return shorten.repr(value)
