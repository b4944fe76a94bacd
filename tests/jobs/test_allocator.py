import platform
import subprocess
import sys
import textwrap

import pytest

JOB = textwrap.dedent("""
    import os, resource, sys
    import numpy as np
    from ggufmill.jobs.allocator import keep_freed, release_freed

    def faults():
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    if sys.argv[1] == "keep":
        keep_freed()
    for i in range(60):
        if i == 20:
            before = faults()
        arrays = [np.ones(2 << 20, np.uint8) for _ in range(6)]
        del arrays
    print(faults() - before)
    held = resident()
    release_freed()
    print(held - resident())
""")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_used_again_and_then_given_back():
    def run(how):
        done = subprocess.run([sys.executable, "-c", JOB, how], capture_output=True, text=True, check=True)
        return [int(line) for line in done.stdout.split()]

    usual, _ = run("usual")
    kept, released = run("keep")
    assert kept < 500 < usual
    assert released > 10 << 20
