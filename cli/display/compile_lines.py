"""Lines about the compiling of kernels, above the bars: while it goes on in a terminal, and how long it took."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ...pipeline.common.progress import Bars
from ...simd.compile.compile_time import compilation_lines, compiling_now, line_about

_EVERY = 1.0  # seconds between two states of a line


@contextmanager
def lines_beside(bars: Bars) -> Iterator[None]:
    """Within this, a line about compiling is written above the bars, and in a terminal one below them counts the seconds."""
    from tqdm import tqdm

    def write(line: str) -> None:
        bars.leave_out_compilation()
        tqdm.write(line, file=sys.stderr)

    ended = threading.Event()
    counter = threading.Thread(target=_count_seconds, args=(ended,), daemon=True)
    if sys.stderr.isatty():
        counter.start()
    try:
        with compilation_lines(write):
            yield
    finally:
        ended.set()
        if counter.is_alive():
            counter.join()


def _count_seconds(ended: threading.Event) -> None:
    from tqdm import tqdm

    line = None
    while not ended.wait(_EVERY):
        now = compiling_now()
        if now is not None:
            if line is None:
                line = tqdm(bar_format="{desc}", leave=False, file=sys.stderr, dynamic_ncols=True)
            line.set_description_str(line_about(*now))
        elif line is not None:
            line.close()
            line = None
    if line is not None:
        line.close()
