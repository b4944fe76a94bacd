"""The options of every verb that carries out a plan, handed over as one value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """How a plan is carried out, whatever verb made it.

    dry_run   it is shown, nothing is written
    resume    an interrupted job is gone on with
    force     what exists is replaced
    verify    samples of what was written are compared with the source (quantize/verify.py)
    manifest  checksums of the output are written beside it
    threads   workers; None: one per processor
    as_json   the result is one JSON object
    """

    dry_run: bool = False
    resume: bool = False
    force: bool = False
    verify: bool = False
    manifest: bool = False
    threads: int | None = None
    as_json: bool = False
