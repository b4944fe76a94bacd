"""A wheel for one platform and version of Python: the one for all, and the kernels that every run needs, compiled.

pip prefers it where it fits. Its kernels are used where the versions of numba and LLVM are those it was made with too; else,
as from the wheel for all, they are compiled when they are first needed.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import subprocess
import sys
import sysconfig
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ggufmill.simd.compile.kernel_pack import FOLDER, pack_name, write_pack
from ggufmill.simd.target import VARIABLE, levels_here

ROOT = Path(__file__).resolve().parent.parent
# The levels of which there are many processors; of one in between, what is below it is too slow, and it compiles.
LEVELS = ("avx2", "avx512-vnni", "avx512-bf16", "amx", "neon-dotprod", "neon-i8mm")


def make_platform_wheel(wheel: Path, python: str, kernels: Path, types: list[str]) -> Path:
    """Writes the platform's wheel beside the one for all, which is installed for an interpreter -> its path.

    kernels: a folder for those that are compiled, a level with each processor. types: of tensors, none for all.
    """
    levels = [level for level in LEVELS if level in levels_here()]

    def fill(level: str) -> Path:
        environment = os.environ | {VARIABLE: level, "GGUFMILL_CACHE": str(kernels / level)}
        command = [python, str(ROOT / "docs" / "fill_kernels.py"), *types]
        done = subprocess.run(
            command, cwd=kernels, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode:
            sys.exit(f"{done.stdout}\nkernels for {level}: exit code {done.returncode}")
        count = write_pack(kernels / level / "kernels", kernels / pack_name(level))
        print(f"{level}: {count} kernels, {(kernels / pack_name(level)).stat().st_size / 1e6:.1f} MB", flush=True)
        return kernels / pack_name(level)

    kernels.mkdir(parents=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        packs = list(pool.map(fill, levels))
    return _with_packs(wheel, packs)


def _tag() -> str:
    """Python, no ABI, and a platform as index servers take it."""
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_").replace("linux_", "manylinux_2_17_")
    return f"cp{sys.version_info.major}{sys.version_info.minor}-none-{platform}"


def _with_packs(wheel: Path, packs: list[Path]) -> Path:
    tag, rows = _tag(), []
    out = wheel.with_name(wheel.name.replace("py3-none-any", tag))
    folder = FOLDER.relative_to(ROOT).as_posix()
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        record = next(name for name in source.namelist() if name.endswith(".dist-info/RECORD"))
        files = {name: source.read(name) for name in source.namelist() if name != record}
        about = record.replace("RECORD", "WHEEL")
        files[about] = files[about].replace(b"Tag: py3-none-any", f"Tag: {tag}".encode())
        files |= {f"ggufmill/{folder}/{pack.name}": pack.read_bytes() for pack in packs}
        for name, content in files.items():
            archive.writestr(name, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            rows.append((name, f"sha256={digest}", len(content)))
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*rows, (record, "", "")])
        archive.writestr(record, text.getvalue())
    return out
