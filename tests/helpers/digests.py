"""Results that are the same on every processor, compared with their digests in tests/data/digests.json.

`tests/levels.py` runs the tests that do so at every level of this processor, and on aarch64. A result that is meant to change
is written by `GGUFMILL_WRITE_DIGESTS=1 python -m pytest TEST` (in one process). Inputs must be the same everywhere too: no
product of floats by numpy, which adds up in the order that suits the processor.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np

FILE = Path(__file__).parents[1] / "data" / "digests.json"


def assert_same_everywhere(name: str, *results: np.ndarray) -> None:
    """That the bytes of `results` are those of all processors; name: of this result, in the file."""
    found = hashlib.sha256(b"".join(np.ascontiguousarray(result).tobytes() for result in results)).hexdigest()[:24]
    digests = json.loads(FILE.read_text()) if FILE.exists() else {}
    if os.environ.get("GGUFMILL_WRITE_DIGESTS"):
        FILE.write_text(json.dumps(dict(sorted({**digests, name: found}.items())), indent=1) + "\n")
    else:
        assert digests.get(name) == found, f"{name} is not what other processors get"
