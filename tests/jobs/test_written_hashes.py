"""Hashes that are taken while files are written: those that reading the files gives, and none where not all was written now."""

import numpy as np
import pytest

from ggufmill.formats import TYPES
from ggufmill.formats.gguf import open_shards
from ggufmill.formats.hashes import hash_file
from ggufmill.jobs.execute import execute
from ggufmill.jobs.outputs import Output
from ggufmill.jobs.plan import make_plan
from ggufmill.jobs.written_hashes import WrittenHashes


def plan(tmp_path, failing=""):
    def output(i):
        rows = np.random.default_rng(i).standard_normal((40 + i, 32)).astype(np.float32)

        def produce(start, stop):
            if f"t{i}" == failing:
                raise MemoryError
            return rows[start:stop].view(np.uint8)

        return Output(f"t{i}", (32, 40 + i), "f32", TYPES["f32"], "test", produce)

    return make_plan([output(i) for i in range(7)], {"general.architecture": "llama"}, tmp_path / "a.gguf", split_max_tensors=3)


@pytest.mark.parametrize("threads", [1, 3])
def test_they_are_those_of_the_files(tmp_path, threads):
    planned = plan(tmp_path)
    hashes = WrittenHashes(planned, threads)
    result = execute(planned, threads=threads, on_bytes=hashes.update)
    assert len(result.paths) == 3
    assert hashes.is_complete
    assert list(hashes.each()) == list(hash_file(open_shards(result.paths), ["sha256"]))


def test_what_an_earlier_job_wrote_is_missing(tmp_path):
    with pytest.raises(MemoryError):
        execute(plan(tmp_path, failing="t4"), threads=1)
    planned = plan(tmp_path)
    hashes = WrittenHashes(planned)
    assert execute(planned, threads=1, resume=True, on_bytes=hashes.update).resumed > 0
    assert not hashes.is_complete
