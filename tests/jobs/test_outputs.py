"""The columns that plans hold their tensors in: as lists of outputs, and small."""

import tracemalloc

import numpy as np

from ggufmill.formats import TYPES
from ggufmill.jobs.outputs import Location, Locations, Output, OutputKind, Outputs
from ggufmill.jobs.plan import make_plan

F32, Q8 = TYPES["f32"], TYPES["q8_0"]


def rows_of(name, kind):
    return lambda start, stop: (name, kind.type.name, start, stop)


def mixed():
    """Tensors that are made on demand, and one with rows of its own in between."""
    outputs = Outputs(rows_of)
    outputs.add("a", OutputKind((32, 2), "bf16", Q8, "rule"))
    outputs.append(Output("a.scale", (1,), "f32", F32, "scale", lambda start, stop: np.zeros((1, 4), np.uint8)))
    outputs.add("b", OutputKind((32, 4), "bf16", Q8, "rule", "a note"))
    outputs.add("c", OutputKind((32, 2), "bf16", Q8, "rule"))
    return outputs


def test_columns_read_as_a_list_of_outputs():
    outputs = mixed()
    assert [o.name for o in outputs] == outputs.names == ["a", "a.scale", "b", "c"]
    assert outputs[-1] == outputs[3]
    assert [o.name for o in outputs[1:3]] == ["a.scale", "b"]
    assert (outputs[2].shape, outputs[2].note, outputs[2].nbytes) == ((32, 4), "a note", 4 * 34)
    assert outputs[0].produce(1, 2) == ("a", "q8_0", 1, 2)
    assert outputs[1].produce(0, 1).shape == (1, 4)
    assert [(kind.rule, n) for kind, n in outputs.counts()] == [("rule", 2), ("scale", 1), ("rule", 1)]
    assert outputs.first_of_kinds() == [0, 1, 2]
    assert [name for name, _ in outputs.of_kinds(lambda kind: kind.type is Q8)] == ["a", "b", "c"]
    assert outputs == list(outputs)
    assert Outputs.of(list(outputs)) == outputs


def test_some_of_the_outputs():
    outputs = mixed()
    taken = outputs.take(np.array([1, 2]))
    assert list(taken) == [outputs[1], outputs[2]]
    assert taken.first_of_kinds() == [0, 1]
    assert len(outputs.take(np.array([], int))) == 0
    assert Outputs().counts() == []


def test_locations_read_as_a_list():
    locations = Locations(np.array([0, 1]), np.array([64, 32]))
    assert list(locations) == [Location(0, 64), Location(1, 32)]
    assert locations[-1].offset == 32


def test_a_plan_of_many_tensors_is_small():
    count = 20_000
    names = [f"blk.{i}.ffn_up.weight" for i in range(count)]
    tracemalloc.start()
    try:
        outputs, kind = Outputs(rows_of), OutputKind((32, 2), "bf16", Q8, "rule")
        for name in names:
            outputs.add(name, kind)
        plan = make_plan(outputs, {"general.architecture": "llama"}, "out.gguf")
        assert plan.total_bytes == 68 * count
        assert plan.files[0].nbytes > plan.total_bytes
        assert tracemalloc.get_traced_memory()[0] < 60 * count  # bytes; an object for each would take 300
    finally:
        tracemalloc.stop()
