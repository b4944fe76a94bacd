"""The options of every verb that carries out a plan, handed over as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from . import flags


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


def job_options(command: Callable) -> Callable:
    """Adds the options to a command, which gets them as one keyword argument, `job`: a `Job`."""
    names = [field.name for field in fields(Job)]
    options = (flags.verify, flags.manifest, flags.dry_run, flags.resume, flags.force, flags.threads, flags.as_json)
    return flags.gathered(options, names, "job", lambda values: Job(**values))(command)
