"""Digests that threads update are those of all bytes in their order."""

import hashlib

import numpy as np
import pytest

from ggufmill.formats import open_gguf
from ggufmill.formats.hashes import ALGORITHMS, DigestThreads, hash_file


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_digest_gets_its_bytes_in_order(threads):
    """Blocks that are handed over, and some that are too small for that between them."""
    sizes = [1 << 20, 100, 1 << 19, 1 << 19, 3, 2 << 20]
    blocks = [np.random.default_rng(i).integers(0, 256, n, np.uint8) for i, n in enumerate(sizes)]
    both, own = hashlib.sha256(), [hashlib.sha256() for _ in blocks]
    hashing = DigestThreads(threads)
    for block, digest in zip(blocks, own, strict=True):
        hashing.update((both, digest), block.data)
    hashing.finish()
    assert both.digest() == hashlib.sha256(np.concatenate(blocks).data).digest()
    assert [digest.digest() for digest in own] == [hashlib.sha256(block.data).digest() for block in blocks]


def test_lines_of_a_file_do_not_depend_on_threads(tmp_path):
    from ggufmill import quantize_model
    from ggufmill.recipes import FOLDER

    quantize_model(FOLDER / "demo", tmp_path / "m.gguf", "q8_0")
    opened = open_gguf(tmp_path / "m.gguf")
    assert max(info.nbytes for info in opened.tensors.values()) > 1 << 18  # so that threads get some
    one, four = ([entry.line() for entry in hash_file(opened, [*ALGORITHMS, "uuid"], threads=n)] for n in (1, 4))
    assert one == four
    info = next(iter(opened.tensors.values()))
    assert any(line.startswith("sha256") and hashlib.sha256(info.data.tobytes()).hexdigest() in line for line in one)
