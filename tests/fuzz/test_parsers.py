"""Every parser against damaged input: a MillError of one line, or a result; never a crash, a hang, or memory
beyond the file's size.

`fuzz.py` beside this feeds the same targets (targets.py) for as long as one likes; what it finds is kept in tests/data/bad and
read here. GGUFMILL_EXAMPLES=2000 tries as many damaged files of each kind instead of a few.
"""

import os
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from targets import TARGETS, damaged, survive

EXAMPLES = int(os.environ.get("GGUFMILL_EXAMPLES", "40"))
BAD = Path(__file__).parent.parent / "data" / "bad"


@pytest.mark.parametrize("name", TARGETS)
def test_whole_files_are_taken(name):
    taken = [survive(name, seed) for seed in TARGETS[name].seeds]
    assert all(taken) if name != "config" else taken[0]  # the others are the demo's under another architecture's name


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.data())
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_damage_is_told(name, data):
    changed = st.integers(0, 1 << 32).map(lambda seed: damaged(name, seed))
    survive(name, data.draw(st.one_of(changed, changed, changed, st.binary(max_size=200))))


@pytest.mark.parametrize("path", sorted(BAD.glob("*.bin")), ids=lambda p: p.stem)
def test_files_that_were_trouble_once(path):
    """NAME of tests/data/bad/NAME-*.bin is the target."""
    name = path.stem.partition("-")[0]
    _ = TARGETS[name].seeds
    survive(name, path.read_bytes())  # imports are no memory that a file takes
    tracemalloc.start()
    try:
        survive(name, path.read_bytes())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    data = path.stat().st_size
    assert peak < (64 << 20 if name == "template" else (4 << 20) + 16 * data)  # a template may make 16 Mi characters
