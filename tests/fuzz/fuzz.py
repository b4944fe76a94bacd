"""Fuzzing by hand: `python tests/fuzz/fuzz.py TARGET [SECONDS]`; guided by coverage with atheris (pip install atheris).

A bad input is written to tests/data/bad/TARGET-DIGEST.bin, where the tests read it from then on. `--coverage` says instead, by
coverage.py, which lines of the target's parsers 3000 damaged files never reach.
"""

import hashlib
import importlib
import random
import resource
import sys
import time
from pathlib import Path

try:
    import atheris
except ImportError:
    atheris = None

BAD = Path(__file__).parent.parent / "data" / "bad"
MEMORY = 1 << 29  # more than the program itself has when it begins

if sys.argv[1:2] == ["model"]:
    atheris = None  # it may compile kernels, which numba cannot do of what atheris has rewritten

if atheris is not None and "--coverage" not in sys.argv:
    _READ = [
        "ggufmill.formats",
        "ggufmill.convert",
        "ggufmill.imatrix",
        "ggufmill.quantize.recipes.recipe",
        "ggufmill.quantize.recipes.rules",
        "ggufmill.runtime.text.template_sandbox",
    ]
    _READ += [
        "ggufmill.runtime.text.vocabulary",
        "ggufmill.runtime.text.tokenizer",
        "ggufmill.runtime.hparams",
        "ggufmill.runtime.models.llama",
    ]
    _READ += ["ggufmill.runtime.serve.requests.fields", "ggufmill.cli"]
    with atheris.instrument_imports(include=_READ):
        import targets
elif "--coverage" not in sys.argv:
    import targets


def limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))


def keep(name: str, data: bytes) -> None:
    path = BAD / f"{name}-{hashlib.sha256(data).hexdigest()[:8]}.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    print(f"kept {path}", file=sys.stderr)


def once(name: str, data: bytes) -> None:
    try:
        targets.survive(name, data)
    except BaseException:
        keep(name, data)
        raise


def blind(name: str, seconds: float) -> int:
    draw = random.Random(time.time_ns())
    end, runs = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        once(name, targets.damaged(name, draw.randrange(1 << 60)))
        runs += 1
    return runs


def covered(name: str) -> None:
    """Prints what of the target's parsers is not reached."""
    from coverage import Coverage

    watch = Coverage(source_pkgs=["ggufmill"], data_file=None)
    watch.start()
    targets = importlib.import_module("targets")
    for seed in range(3000):
        targets.survive(name, targets.damaged(name, seed))
    watch.stop()
    for module in targets.TARGETS[name].parsers:
        file = sys.modules[f"ggufmill.{module}"].__file__
        _, lines, _, missed, _ = watch.analysis2(file)
        print(f"{module}: {len(missed)} of {len(lines)} lines not reached: {missed}")


def guided(name: str, seconds: float) -> None:
    corpus = targets.folder() / f"corpus-{name}"
    corpus.mkdir()
    for i, seed in enumerate(targets.TARGETS[name].seeds):
        (corpus / str(i)).write_bytes(seed)
    words = targets.folder() / "words"
    spelt = ("".join(f"\\x{b:02x}" for b in word.encode("utf-8", "replace")) for word in targets.TARGETS[name].words)
    words.write_text("".join(f'"{word}"\n' for word in spelt))

    def mutated(data: bytes, most: int, seed: int) -> bytes:
        draw = random.Random(seed)
        if targets.TARGETS[name].shape == "" or draw.random() < 0.3:
            return atheris.Mutate(data, most)
        return targets.damaged(name, seed, data)[:most]

    options = [f"-artifact_prefix={BAD}/{name}-", f"-max_total_time={seconds:.0f}", "-print_final_stats=1", f"-dict={words}"]
    options += ["-rss_limit_mb=4096", "-max_len=32768", "-timeout=60"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], lambda data: once(name, data), custom_mutator=mutated)
    atheris.Fuzz()


def main() -> None:
    name = sys.argv[1]
    if "--coverage" in sys.argv:
        covered(name)
        return
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 600
    _ = targets.TARGETS[name].seeds
    limit_memory()
    if atheris is None:
        print(f"{name}: {blind(name, seconds)} inputs in {seconds:.0f} s, none bad")
    else:
        guided(name, seconds)


if __name__ == "__main__":
    main()
