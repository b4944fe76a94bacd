import platform
import subprocess
import sys
import textwrap

import pytest

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
