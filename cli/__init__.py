"""The command line. Little is imported here, so that signals are handled from the beginning."""

from __future__ import annotations

import sys

from . import signals


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line. Exit codes: 0 done, 1 the work failed, 2 wrong usage, 128 + signal after one that asks it to end.

    arguments: those of the process if None, which then ends with this function.

    A verb that can go on after Ctrl-C says so in the KeyboardInterrupt it raises: KeyboardInterrupt("--resume continues ...").
    """
    with signals.raised_as_interrupt(is_program=arguments is None):
        try:
            from .program import run

            run(arguments)
        except SystemExit as end:
            if arguments is None and isinstance(end.code, int):
                signals.end_with(end.code)
            raise
        except BaseException as error:
            if signals.received():  # what an import makes of a KeyboardInterrupt may be another exception
                print("ggufmill: interrupted", file=sys.stderr)
                signals.end_with(signals.exit_code())
                sys.exit(signals.exit_code())
            if not isinstance(error, ImportError | OSError | MemoryError):
                raise
            print("ggufmill: the program cannot be loaded:", " ".join(str(error).split()), file=sys.stderr)
            sys.exit(1)
