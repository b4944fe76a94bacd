"""`dataclass`, as the standard library has it, in a fraction of the time.

That one writes the methods of each class as source code, six of a frozen one, and compiles them: a third of the time in which
a verb's modules are imported. Here methods that need no code of their own have none, and `__init__` is written when the first
instance is made, which of most classes a command never does.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any


class _NotGiven:
    def __repr__(self) -> str:
        return "<factory>"  # in signatures, as there


_NOT_GIVEN = _NotGiven()

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, eq=True, kw_only=False, slots=False):
        """`dataclasses.dataclass` with these options; `order`, others and `InitVar` are left to the original."""
        if cls is None:
            return lambda c: dataclass(c, frozen=frozen, eq=eq, kw_only=kw_only, slots=slots)
        cls.__doc__ = cls.__doc__ or cls.__name__  # else the signature, which takes long
        inherited = [params.frozen for base in cls.__mro__[1:] if (params := getattr(base, "__dataclass_params__", None))]
        inherits = any(inherited)
        if frozen and inherited and not inherits:
            raise TypeError("cannot inherit frozen dataclass from a non-frozen one")
        for name in ("__setattr__", "__delattr__") if frozen else ():
            if name in cls.__dict__:
                raise TypeError(f"Cannot overwrite attribute {name} in class {cls.__name__}")
        given = set(cls.__dict__)
        options = {"frozen": frozen and inherits, "kw_only": kw_only, "slots": slots}
        cls = dataclasses.dataclass(init=False, repr=False, eq=False, **options)(cls)
        cls.__dataclass_params__.frozen = frozen  # of frozen classes only frozen ones may inherit, whoever makes them
        own = cls.__dict__
        _check_order(cls)
        if "__init__" not in own:
            cls.__init__, cls.__signature__ = _first_init(cls, frozen), _Signature()
        if "__repr__" not in own:
            cls.__repr__ = _repr
        if eq:
            _set_comparison(cls, frozen)
        if frozen and not inherits:
            cls.__setattr__, cls.__delattr__ = _refusing(cls)
            for name, method in (("__getstate__", _state_of), ("__setstate__", _set_state)) if slots else ():
                if name not in given:
                    setattr(cls, name, method)
        return cls


def _check_order(cls: Any) -> None:
    """Raises TypeError, as the original does, for a field without a default behind one with one."""
    has_default = False
    for field in dataclasses.fields(cls):
        if not field.init or field.kw_only:
            continue
        if field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING:
            has_default = True
        elif has_default:
            raise TypeError(f"non-default argument {field.name!r} follows default argument")


def _set_comparison(cls: Any, frozen: bool) -> None:
    """Instances of one class are equal if their fields are, as tuples; frozen ones have a hash."""
    own, fields = cls.__dict__, dataclasses.fields(cls)
    has_hash = own.get("__hash__") is not None or ("__hash__" in own and "__eq__" not in own)
    if not has_hash:
        hashed = _values([f.name for f in fields if (f.compare if f.hash is None else f.hash)])
        cls.__hash__ = (lambda self: hash(hashed(self))) if frozen else None
    if "__eq__" not in own:
        compared = _values([f.name for f in fields if f.compare])

        def __eq__(self: Any, other: Any) -> Any:
            return compared(self) == compared(other) if other.__class__ is self.__class__ else NotImplemented

        cls.__eq__ = __eq__


def _values(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """The function that gives these attributes of an object."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda instance: tuple(getattr(instance, name) for name in names)


@recursive_repr()
def _repr(self: Any) -> str:
    shown = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr)
    return f"{type(self).__qualname__}({shown})"


def _state_of(self: Any) -> list[Any]:
    """What pickle and copy keep of a frozen instance with slots, whose attributes they cannot set."""
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)


def _refusing(cls: type) -> tuple[Callable[..., None], Callable[..., None]]:
    """`__setattr__` and `__delattr__` of a frozen class; subclasses that are no dataclasses may have further attributes."""
    names = cls.__dict__["__dataclass_fields__"]

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return __setattr__, __delattr__


def _first_init(cls: Any, frozen: bool) -> Callable[..., None]:
    """The `__init__` that puts the one which it writes in its own place."""

    @cache
    def written() -> Callable[..., None]:
        return _written_init(cls, frozen)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if cls.__init__ is __init__:
            cls.__init__ = written()
        written()(self, *args, **kwargs)

    __init__.written = written  # pyright: ignore[reportFunctionMemberAccess]
    return __init__


def _written_init(cls: Any, frozen: bool) -> Callable[..., None]:
    """`__init__` with a parameter for each field, those that are by keyword only last, and a call of `__post_init__`."""
    positional, by_keyword, lines = [], [], []
    values: dict[str, Any] = {"_set": object.__setattr__, "_not_given": _NOT_GIVEN}
    annotations: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        name, value, default = field.name, field.name, ""
        if field.default_factory is not dataclasses.MISSING:
            values[f"_new_{name}"], default = field.default_factory, "=_not_given"
            value = f"_new_{name}() if {name} is _not_given else {name}" if field.init else f"_new_{name}()"
        elif field.default is not dataclasses.MISSING:
            values[f"_default_{name}"], default = field.default, f"=_default_{name}"
        if field.init:
            annotations[name] = field.type
            (by_keyword if field.kw_only else positional).append(name + default)
        elif field.default_factory is dataclasses.MISSING:
            if field.default is dataclasses.MISSING or "__slots__" not in cls.__dict__:
                continue  # what __post_init__ sets, or the class's attribute
            value = f"_default_{name}"
        lines.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    parameters = ", ".join(["self", *positional, *(["*", *by_keyword] if by_keyword else [])])
    body, made = "\n  ".join(lines or ["pass"]), dict[str, Any]()
    source = f"def make({', '.join(values)}):\n def __init__({parameters}):\n  {body}\n return __init__"
    exec(source, vars(sys.modules[cls.__module__]), made)  # what it names are the module's, too
    init = made["make"](**values)
    init.__qualname__, init.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    init.__annotations__ = {**annotations, "return": None}
    return init


class _Signature:
    """The signature of a class as a call of it has it, which `inspect` asks the class for."""

    def __get__(self, instance: Any, cls: type) -> inspect.Signature | None:
        if instance is not None:  # that of its class's `__call__`
            return None
        written = getattr(cls.__init__, "written", None)
        signature = inspect.signature(cls.__init__ if written is None else written())
        return signature.replace(parameters=list(signature.parameters.values())[1:])
