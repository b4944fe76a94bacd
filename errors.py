"""Errors that a user may see: one line each, saying what is wrong, where, and what to do."""


class MillError(Exception):
    """An error that the user can act on. The command line prints its text as one line and exits with code 1.

    Unprintable characters are escaped, since the text may quote names from a damaged file.
    """

    def __init__(self, text: str):
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))


class FormatError(MillError):
    """A file is truncated, malformed, or of an unsupported kind."""


class PlanError(MillError):
    """A job cannot be done as requested. Raised before anything is written."""
