"""All of the torture: `python tests/torture/run.py [EXAMPLES [TRIALS [REQUESTS]]]`.

It ends with a table of what was tried and what it found; Ctrl-C ends it with the table so far.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import flood
import inputs
import kills
import power


def tried(examples: int, trials: int, requests: int) -> Iterator[tuple[str, int, str]]:
    """(what was tried, how often, what it found or ''), one after the other."""
    for kind, count, found in flood.torture(requests):
        yield f"requests: {kind}", count, found
    for disturb in (kills.torture, power.torture):
        for name, what, count, found in disturb(trials):
            yield f"{name}: {what}", int(count), found
    for name, count, seconds, longest, mebibytes, found in inputs.torture(examples):
        yield f"damaged inputs: {name} ({seconds} s, longest {longest} s, {mebibytes} MiB)", int(count), found


def main(examples: int = 1000, trials: int = 4, requests: int = 3000) -> int:
    began, rows, is_complete = time.monotonic(), [], False
    with suppress(KeyboardInterrupt):
        for what, count, found in tried(examples, trials, requests):
            rows.append((what, count, found))
        is_complete = True
    width = max((len(what) for what, _, _ in rows), default=0)
    print(f"\n{'tried':{width}}  {'times':>6}  found")
    for what, count, found in rows:
        print(f"{what:{width}}  {count:6}  {found or '-'}")
    n_found = sum(bool(found) for _, _, found in rows)
    minutes, end = (time.monotonic() - began) / 60, "" if is_complete else "; interrupted"
    print(f"{sum(count for _, count, _ in rows)} times in {minutes:.1f} minutes, {n_found} rows with findings{end}")
    return 0 if is_complete and not n_found else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
