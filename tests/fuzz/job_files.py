"""Parsers of what jobs remember in files."""

import io
import json
import os
import tempfile
from contextlib import redirect_stderr
from functools import cache
from pathlib import Path

import numpy as np
import seeds

from ggufmill.cli.display.origins import comparison_text
from ggufmill.formats.types import TYPES
from ggufmill.imatrix.collect_state import load_state
from ggufmill.jobs.code_digest import code_digest
from ggufmill.jobs.execute import execute
from ggufmill.jobs.journal import journal_path
from ggufmill.jobs.outputs import Output
from ggufmill.jobs.plan import make_plan
from ggufmill.pipeline.measuring.perplexity import read_result
from ggufmill.pipeline.recipe_search.measurements import Measurements
from ggufmill.pipeline.stages.cache import StageCache
from ggufmill.runtime.evaluate.provenance import compare_results


@cache
def folder() -> Path:
    """In memory where there is such a place: thousands of files are written."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="fuzz-", dir=os.environ.get("TMPDIR", shared)))


def written(name: str, data: bytes) -> Path:
    path = folder() / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def _plan():
    def zeros(start: int, stop: int) -> np.ndarray:
        return np.zeros((stop - start, 128), np.uint8)

    outputs = [Output(f"t{i}", (32, 2 + i), "f32", TYPES["f32"], "", zeros) for i in range(3)]
    return make_plan(outputs, {}, folder() / "job" / "out.gguf")


def journal_seed() -> bytes:
    from ggufmill.formats.file_range import range_checksum

    nothing = written("zeros", bytes(512))
    lines = [{"fingerprint": _plan().fingerprint, "tensors": 3, "code": code_digest()}, {"event": "synced"}]
    lines += [{"tensor": f"t{i}", "xxh3": range_checksum(nothing, 0, 128 * (2 + i))} for i in range(2)]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def journal(data: bytes) -> None:
    plan = _plan()
    written(f"job/{journal_path(plan).name}", data)
    execute(plan, threads=1, resume=True)


def state(data: bytes) -> None:
    found = load_state(written("a.state", data))
    assert all(s.dtype == np.float64 and s.ndim == 2 for s in found.sums.values())
    assert all(c.shape == found.sums[name].shape[:1] for name, c in found.counts.items())
    found.check(found.fingerprint, 1 << 62)


def memory(data: bytes) -> None:
    """The file in which `run` remembers what it has done."""
    path = written("memory/state.json", data)
    with redirect_stderr(io.StringIO()):
        StageCache(path, fresh=None).stage("imatrix", "key", [written("memory/made", b"x")], lambda: {"chunks": 1})


def measured(data: bytes) -> None:
    """What `search` keeps of its measurements."""
    path = written("measured.json", data)
    found = Measurements(path, "key")
    sum(error for types in found.errors.values() for error in types.values())
    sum(sum(figures) for types in found.divergences.values() for figures in types.values())
    [TYPES[kind] for probes in found.probes.values() for types in probes.values() for kind in types.values()]


def result(data: bytes) -> None:
    """What `perplexity --compare-with` reads."""
    found, ours = read_result(written("result.json", data)), json.loads(seeds.RESULT)
    comparison_text(ours, found, compare_results(ours, found))
