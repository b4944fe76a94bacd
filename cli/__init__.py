"""The command line. Little is imported here: until `main` runs, Ctrl-C shows a traceback."""

from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line. Exit codes: 0 done, 1 the work failed, 2 wrong usage.

    A verb that can go on after Ctrl-C says so in the KeyboardInterrupt it raises: KeyboardInterrupt("--resume goes on ...").
    """
    try:
        from .program import run
    except KeyboardInterrupt:
        print("ggufmill: interrupted", file=sys.stderr)
        sys.exit(1)
    run(arguments)
