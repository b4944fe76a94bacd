import os
import platform
import subprocess
import sys
import textwrap
from mmap import PAGESIZE, mmap

import numpy as np
import pytest

from ggufmill.operating_system.memory import cached_pages, may_be_asked_for

SCRIPT = textwrap.dedent("""
    import os, resource, sys
    import numpy as np
    from ggufmill.operating_system.memory import retain_free_memory, trim_free_memory

    def faults():
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    if sys.argv[1] == "retain":
        retain_free_memory()
    for i in range(60):
        if i == 20:
            before = faults()
        arrays = [np.ones(2 << 20, np.uint8) for _ in range(6)]
        del arrays
    print(faults() - before)
    before = resident()
    trim_free_memory()
    print(before - resident())
""")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_free_memory_is_reused_and_then_returned():
    def run(mode):
        done = subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, check=True)
        return [int(line) for line in done.stdout.split()]

    default_faults, _ = run("default")
    faults, trimmed = run("retain")
    assert faults < 500 < default_faults
    assert trimmed > 10 << 20


@pytest.mark.parametrize("offset", [0, 1, 100])
@pytest.mark.parametrize("nbytes", [1, PAGESIZE, 5 * PAGESIZE, 5 * PAGESIZE + 99])
def test_pages_of_a_file_that_were_just_written_are_in_memory(offset, nbytes, tmp_path):
    mapped = np.memmap(tmp_path / "file", np.uint8, "w+", shape=6 * PAGESIZE)
    mapped[:] = 1
    pages = cached_pages(mapped[offset:].ctypes.data, nbytes)
    assert len(pages) == -(-(offset + nbytes) // PAGESIZE)
    assert set(pages) == {1 if sys.platform == "linux" else pages[0]}


def test_pages_that_are_not_mapped_are_not_in_memory():
    mapped = mmap(-1, 2 * PAGESIZE)
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    assert cached_pages(address, 2 * PAGESIZE) == b"\0\0"  # none was written
    mapped[PAGESIZE] = 1
    assert cached_pages(address, 2 * PAGESIZE)[0] == 0


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no owners of this kind")
def test_files_of_others_are_not_asked_for(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    assert may_be_asked_for(file)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write to any
    assert may_be_asked_for(file)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert not may_be_asked_for(file)
    assert not may_be_asked_for(tmp_path / "gone")
