"""Classes of our `dataclass` beside those of the standard library."""

import copy
import dataclasses
import inspect
import pickle
import typing
from dataclasses import field

import pytest

from ggufmill.data_classes import dataclass


def _classes(decorator):
    @decorator(frozen=True)
    class Base:
        a: int
        b: str = "b"

        def __post_init__(self):
            object.__setattr__(self, "seen", self.a)

    @decorator(frozen=True)
    class Derived(Base):
        a: int = 7
        c: list = field(default_factory=list, compare=False)
        d: float = field(default=0.5, kw_only=True)
        e: int = field(default=3, init=False, repr=False)

    @decorator
    class Mutable:
        x: int
        y: list = field(default_factory=list)

    @decorator(frozen=True, eq=False)
    class Identity:
        x: int

    @decorator(frozen=True, kw_only=True)
    class Keywords:
        x: int
        y: int = 1

        def __eq__(self, other):
            return True

        def __repr__(self):
            return "own"

    @decorator(frozen=True, slots=True)
    class Slots:
        x: int
        y: list = field(default_factory=list, repr=False)
        z: str = field(default="z", compare=False)
        w: int = field(default=3, init=False)

    return Base, Derived, Mutable, Identity, Keywords, Slots


CALLS = [
    (0, (1,), {}), (0, (1, "z"), {}), (0, (), {}), (0, (1, 2, 3), {}), (0, (), {"a": 2}),
    (1, (), {}), (1, (1, "q", [2]), {"d": 2.0}), (1, (1, "q", [3]), {"d": 2.0}),
    (2, (1,), {}), (2, (1, [2]), {}), (2, (1, [2]), {"y": 2}), (3, (1,), {}), (4, (), {"x": 1}),
    (4, (1,), {}), (4, (), {"z": 1}), (5, (1,), {"y": 2}), (5, (1, 2), {"z": ""}), (5, (), {}),
]  # fmt: skip


def _made(classes):
    for number, args, kwargs in CALLS:
        try:
            yield classes[number](*args, **kwargs)
        except TypeError as error:
            yield str(error)


def test_instances_are_as_those_of_the_standard_library():
    ours, theirs = list(_made(_classes(dataclass))), list(_made(_classes(dataclasses.dataclass)))
    assert list(map(repr, ours)) == list(map(repr, theirs))
    assert any(isinstance(each, str) for each in ours)
    assert [[a == b for a in ours] for b in ours] == [[a == b for a in theirs] for b in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert isinstance(a, str) or getattr(a, "__dict__", None) == getattr(b, "__dict__", None)
        assert (a.__hash__ is None) == (b.__hash__ is None)
        if dataclasses.is_dataclass(b) and type(b).__hash__ not in (None, object.__hash__):
            assert hash(a) == hash(b)


def test_classes_have_the_fields_and_signatures_of_the_standard_library():
    for a, b in zip(_classes(dataclass), _classes(dataclasses.dataclass), strict=True):
        assert str(inspect.signature(a)) == str(inspect.signature(b))
        assert [f.name for f in dataclasses.fields(a)] == [f.name for f in dataclasses.fields(b)]
        assert a.__match_args__ == b.__match_args__


def test_frozen_instances_cannot_be_changed():
    base, derived, mutable, identity, _, slots = _classes(dataclass)
    for instance in (base(1), derived(), identity(2), slots(3)):
        with pytest.raises(dataclasses.FrozenInstanceError, match="assign to field 'a'"):
            instance.a = 1
        with pytest.raises(dataclasses.FrozenInstanceError, match="delete field 'a'"):
            del instance.a
    changed = mutable(1)
    changed.x = 2
    assert changed == mutable(2)
    plain = type("Plain", (base,), {})(1)
    plain.other = 2
    assert plain.other == 2
    assert plain.seen == 1


@dataclass(frozen=True)
class Pickled:
    x: int
    y: tuple = ()


@dataclass(frozen=True, slots=True)
class PickledSlots:
    x: int
    y: tuple = ()


@pytest.mark.parametrize("made", [Pickled, PickledSlots])
def test_instances_are_copied_pickled_and_replaced(made):
    value = made(1, (2,))
    assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == copy.copy(value) == value
    assert dataclasses.replace(value, x=5) == made(5, (2,))
    assert dataclasses.asdict(value) == {"x": 1, "y": (2,)}


def test_slots_keep_what_a_class_says_of_pickling_and_defaults():
    def of(decorator):
        @decorator(frozen=True, slots=True)
        class Own:
            x: int
            y: int = field(default=3, init=False)

            def __getstate__(self):
                return [self.x]

            def __setstate__(self, state):
                object.__setattr__(self, "x", state[0] + 1)

        return Own(1).y, copy.copy(Own(1)).x

    assert of(dataclass) == of(dataclasses.dataclass) == (3, 2)


def test_classes_of_both_kinds_inherit_from_each_other():
    @dataclasses.dataclass(frozen=True)
    class Theirs(Pickled):
        z: int = 3

    @dataclass(frozen=True)
    class Ours(Theirs):
        y: tuple = (9,)

    assert (Theirs(1).z, Ours(1).y, repr(Ours(1, z=2)).endswith("Ours(x=1, y=(9,), z=2)")) == (3, (9,), True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Ours(1).z = 4
    for decorator in (dataclass, dataclasses.dataclass):
        with pytest.raises(TypeError, match="cannot inherit non-frozen dataclass from a frozen one"):
            decorator(type("Mutable", (Pickled,), {}))


def test_an_instance_that_holds_itself_has_a_repr():
    _, _, mutable, *_ = _classes(dataclass)
    value = mutable(1)
    value.y.append(value)
    assert repr(value).endswith("y=[...])")


def _refused(decorator):
    @decorator
    class Mutable:
        x: int = 0

    def frozen_from_mutable():
        @decorator(frozen=True)
        class Frozen(Mutable):
            y: int = 0

    def without_default_after_one():
        @decorator
        class Disordered:
            x: int = 0
            y: int

    def own_setattr():
        @decorator(frozen=True)
        class Own:
            x: int

            def __setattr__(self, name, value):
                pass

    for define in (frozen_from_mutable, without_default_after_one, own_setattr):
        with pytest.raises(TypeError) as caught:
            define()
        yield str(caught.value)


def test_definitions_are_refused_as_by_the_standard_library():
    assert list(_refused(dataclass)) == list(_refused(dataclasses.dataclass))


@dataclass
class _Called:
    x: "int" = 0

    def __call__(self, q, r):
        return q, r


def test_an_init_that_is_wrapped_or_taken_over():
    original = _Called.__init__
    try:
        _Called.__init__ = lambda self, *args: original(self, *args)
        assert _Called(3).x == 3
    finally:
        _Called.__init__ = original
    assert _Called(x=4).x == 4
    assert typing.get_type_hints(_Called.__init__) == {"x": int, "return": type(None)}


def test_signatures_of_instances_are_those_of_their_calls():
    assert list(inspect.signature(_Called()).parameters) == ["q", "r"]
    assert list(inspect.signature(_Called).parameters) == ["x"]
