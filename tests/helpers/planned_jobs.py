"""Small plans for tests of jobs: tensors whose rows hold their own numbers, and one that cannot be made."""

import numpy as np
import pytest

from ggufmill.formats import TYPES, MillError
from ggufmill.jobs.execute import execute
from ggufmill.jobs.outputs import Output
from ggufmill.jobs.plan import make_plan


def output(name, shape, type_name="f32", produce=None, rule="test"):
    """A tensor whose rows are filled with their own numbers, so that a misplaced chunk shows."""
    tensor_type = TYPES[type_name]
    row_bytes = tensor_type.row_bytes(shape[0])

    def rows(start, stop):
        return np.repeat((np.arange(start, stop) % 251).astype(np.uint8)[:, None], row_bytes, 1)

    return Output(name, shape, "f32", tensor_type, rule, produce or rows)


def plan_of(tmp_path, outputs, **options):
    return make_plan(outputs, {"general.architecture": "test"}, tmp_path / "out.gguf", **options)


def failing(after):
    calls = []

    def produce(start, stop):
        calls.append(start)
        if len(calls) > after:
            raise MillError("t1: the weight at row 0, column 0 is nan")
        return np.zeros((stop - start, 1024), np.uint8)

    return produce


def interrupted_plan(tmp_path):
    """A plan of three tensors, of which two are written; its last one cannot be made."""
    plan = plan_of(tmp_path, [output("a", (256, 16)), output("b", (256, 16)), output("c", (256, 16), produce=failing(0))])
    with pytest.raises(MillError):
        execute(plan, threads=1)
    return plan_of(tmp_path, [output(name, (256, 16)) for name in "abc"])
