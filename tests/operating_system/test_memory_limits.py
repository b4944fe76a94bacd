"""Limits of memory as Linux shows them, in a folder that stands for its root."""

import pytest

from ggufmill.operating_system.memory import free_bytes
from ggufmill.runtime.loading import decoded_bytes

GIB = 1 << 30


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


BIG, OLD = "sys/fs/cgroup", "sys/fs/cgroup/memory"
MACHINE = {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:   {8 * GIB >> 10} kB\n"}
TWO = MACHINE | {"proc/self/cgroup": "0::/user/job\n", f"{BIG}/user/job/memory.max": "max\n"}
ONE = MACHINE | {"proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/box\n0::/\n", f"{OLD}/memory.limit_in_bytes": f"{1 << 62}\n"}
CASES = {
    "nothing known": ({}, 4 * GIB),
    "much": ({"proc/meminfo": f"MemAvailable: {64 * GIB >> 10} kB\n"}, 4 * GIB),
    "a machine of 8 GiB": (MACHINE, 2 * GIB),
    "no limit": (TWO, 2 * GIB),
    "a group": (
        TWO | {f"{BIG}/user/job/memory.max": f"{GIB}\n", f"{BIG}/user/job/memory.stat": f"anon {GIB // 2}\nfile 7\n"},
        GIB // 8,
    ),
    "the group around it": (TWO | {f"{BIG}/user/memory.max": f"{GIB}\n"}, GIB // 4),
    "a container": (TWO | {f"{BIG}/memory.max": f"{2 * GIB}\n"}, GIB // 2),
    "the older kind": (
        ONE | {f"{OLD}/box/memory.limit_in_bytes": f"{3 * GIB}\n", f"{OLD}/box/memory.stat": f"rss 1\ntotal_rss {GIB}\n"},
        GIB // 2,
    ),
    "nothing left": (TWO | {f"{BIG}/user/job/memory.max": "4096\n", f"{BIG}/user/job/memory.stat": "anon 9999\n"}, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_decoded_weights_take_a_quarter_of_what_is_free(tmp_path, case):
    files, expected = CASES[case]
    write(tmp_path, files)
    assert decoded_bytes(free_bytes(tmp_path)) == expected
