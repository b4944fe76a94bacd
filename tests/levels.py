"""Runs the tests of codecs and kernels at every lesser level of this processor, or on aarch64 in emulation.

    python tests/levels.py [LEVEL ...]     all levels below the processor's own, which plain pytest tests
    python tests/levels.py --arm           the levels of aarch64 (tests/arm/environment.py sets it up)
    python tests/levels.py --quick ...     golden files and products of all types; on aarch64 a part, at one level

One process per level, as many at a time as there are cores. Logs lie in build/levels. The last line counts all tests.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ggufmill.simd.target import LEVELS, VARIABLE, levels_here

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "build" / "levels"
ARM_PYTHON = ROOT / "build" / "arm" / "python"
TESTS = [
    "tests/simd/test_lanes.py",
    "tests/simd/test_byte_lanes.py",
    "tests/simd/instructions/test_dot_products.py",
    "tests/simd/instructions/test_permute.py",
    "tests/simd/instructions/test_half_precision.py",
    "tests/quantize/codecs",
    "tests/quantize/covariance",
    "tests/repack/test_interleave.py",
    "tests/formats/test_layouts.py",
    "tests/imatrix/covariance/test_sums.py",
    "tests/runtime/backends/cpu/kernels",
    "tests/runtime/backends/cpu/test_ops.py",
    "tests/runtime/backends/cpu/test_flash.py",
]
# What `--quick` runs: the golden files of all codecs, encoding under a covariance, products of every type. Operations on lanes:
# tests/simd/test_levels.py, always.
SAME_BITS = "::test_all_processors_get_the_same_bits"
QUICK = [
    "tests/quantize/codecs/test_golden.py",
    "tests/quantize/covariance/test_same_bytes.py",
    *(f"tests/runtime/backends/cpu/kernels/test_{part}.py" for part in ("gemv", "gemv_plan")),
    f"tests/runtime/backends/cpu/kernels/test_gemm_products.py{SAME_BITS}",
    "tests/runtime/backends/cpu/test_flash.py::test_a_few_tokens_after_others",
]
# glibc overwrites memory that is freed: a kernel that reads an array after its end fails (elsewhere nothing looks at this).
POISON = {"GLIBC_TUNABLES": "glibc.malloc.perturb=85:glibc.malloc.tcache_count=0"}
QUICK_ARM = [
    "tests/simd/instructions/test_dot_products.py",
    "tests/simd/instructions/test_permute.py",
    "tests/quantize/codecs/test_golden.py",
    f"tests/runtime/backends/cpu/kernels/test_gemv.py{SAME_BITS}[iq4_ks]",
    "-k",
    "arm or K] or iq4_ks]",
]


def run(level: str, python: str, tests: list[str]) -> tuple[Counter[str], str]:
    """Runs tests at one level -> how many passed, failed, ...; the end of the log if not all passed, else ""."""
    started = time.monotonic()
    log = LOGS / f"{level}.log"
    one_thread = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS")}
    environment = {**os.environ, **one_thread, **POISON, VARIABLE: level, "GGUFMILL_TEST_PYTHON": python}
    with log.open("w") as out:
        command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-rfE", *tests]
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT).returncode
    lines = log.read_text(errors="replace").strip().splitlines() or [""]
    summary = lines[-1].strip("= ")
    print(f"{level:<14} {summary}  ({time.monotonic() - started:.0f} s)", flush=True)
    counts = Counter(
        {word.rstrip("s"): int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", summary)}
    )
    if code and not counts["failed"] + counts["error"]:  # the process itself died
        counts["error"] += 1
    return counts, "" if not code else f"\n{level}: exit status {code}\n" + "\n".join(lines[-60:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("levels", nargs="*", metavar="LEVEL")
    parser.add_argument("--arm", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    python = str(ARM_PYTHON) if options.arm else sys.executable
    there = [name for name in LEVELS if LEVELS[name].architecture in ("", "aarch64")] if options.arm else levels_here()[:-1]
    levels = options.levels or (there[-1:] if options.arm and options.quick else there)
    tests = (QUICK_ARM if options.arm else QUICK) if options.quick else TESTS
    LOGS.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda level: run(level, python, tests), levels))
    for _, end in results:
        if end:
            print(end, file=sys.stderr)
    total = sum((counts for counts, _ in results), Counter())
    failed = total["failed"] + total["error"]
    print(f"levels: {total['passed']} passed, {failed} failed, {total['skipped']} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
