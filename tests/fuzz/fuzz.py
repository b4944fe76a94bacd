"""Fuzzing by hand: `python tests/fuzz/fuzz.py TARGET [SECONDS]`; guided by coverage with atheris (pip install atheris).

A bad input is written to tests/data/bad/TARGET-DIGEST.bin, where the tests read it from then on.
"""

import hashlib
import random
import resource
import sys
import time

try:
    import atheris
except ImportError:
    atheris = None

if atheris is not None:
    _READ = ["ggufmill.formats", "ggufmill.convert", "ggufmill.imatrix", "ggufmill.quantize.recipe"]
    with atheris.instrument_imports(include=_READ):
        import test_parsers
else:
    import test_parsers

MEMORY = 1 << 30  # more than the program itself has when it begins


def limit_memory() -> None:
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))


def keep(name: str, data: bytes) -> None:
    path = test_parsers.BAD / f"{name}-{hashlib.sha256(data).hexdigest()[:8]}.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    print(f"kept {path}", file=sys.stderr)


def once(name: str, data: bytes) -> None:
    try:
        test_parsers.survive(name, data)
    except BaseException:
        keep(name, data)
        raise


def mutated(seeds: tuple[bytes, ...], draw: random.Random) -> bytes:
    data = bytearray(draw.choice(seeds))
    for _ in range(1 << draw.randrange(5)):
        at, n = draw.randrange(len(data) + 1), draw.randrange(1, 1 << draw.randrange(1, 8))
        data[at : at + draw.choice((0, n))] = draw.choice(
            (draw.randbytes(n), b"\xff" * n, bytes(n), data[:n], data[at : at + n] * 3, b"")
        )
    return bytes(data)


def blind(name: str, seconds: float) -> int:
    seeds, draw = test_parsers.targets_now()[name].seeds, random.Random(time.time_ns())
    end, runs = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        once(name, mutated(seeds, draw))
        runs += 1
    return runs


def main() -> None:
    name = sys.argv[1]
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 600
    limit_memory()
    if atheris is None:
        print(f"{name}: {blind(name, seconds)} inputs in {seconds:.0f} s, none bad")
        return
    corpus = test_parsers.folder() / f"corpus-{name}"
    corpus.mkdir()
    for i, seed in enumerate(test_parsers.targets_now()[name].seeds):
        (corpus / str(i)).write_bytes(seed)
    options = [f"-artifact_prefix={test_parsers.BAD}/{name}-", f"-max_total_time={seconds:.0f}", "-print_final_stats=1"]
    options += ["-rss_limit_mb=4096", "-max_len=8192", "-timeout=30"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], lambda data: once(name, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
