"""All of the torture: `python tests/torture/run.py [EXAMPLES [TRIALS [REQUESTS]]]`. It ends with a table of what it found."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import flood
import inputs
import kills
import power


def main(examples: int = 1000, trials: int = 4, requests: int = 3000) -> int:
    began = time.monotonic()
    damaged = inputs.torture(examples)
    rows = [(f"damaged inputs: {name}", int(count), found) for name, count, _, _, _, found in damaged]
    disturbed = kills.torture(trials) + power.torture(trials)
    rows += [(f"{name}: {what}", int(count), found) for name, what, count, found in disturbed]
    rows += [(f"requests: {kind}", count, found) for kind, count, found in flood.torture(requests)]
    width = max(len(what) for what, _, _ in rows)
    print(f"\n{'tried':{width}}  {'times':>6}  found")
    for what, count, found in rows:
        print(f"{what:{width}}  {count:6}  {found or '-'}")
    n_found = sum(bool(found) for _, _, found in rows)
    minutes = (time.monotonic() - began) / 60
    print(f"{sum(count for _, count, _ in rows)} times in {minutes:.1f} minutes; {n_found} rows with findings; ", end="")
    print(f"the longest input took {max((row[3] for row in damaged), key=lambda text: float(text or 0))} s")
    return bool(n_found)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
