"""The errors a user may see: one line each, saying what is wrong, where, and what to do."""


class MillError(Exception):
    """Something the user can act on. The command line prints its text as one line and exits with 1.

    Names from a damaged file may be part of the text: what is not printable is escaped.
    """

    def __init__(self, text: str):
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))


class FormatError(MillError):
    """A file is not what it should be: truncated, malformed, or of a kind that is not supported."""


class PlanError(MillError):
    """The job that was asked for cannot be done as asked (found before any work began)."""
