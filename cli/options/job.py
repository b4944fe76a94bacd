"""The options of every verb that writes model files, gathered into one `Job`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from ...pipeline.job_options import Job
from . import flags


def job_options(command: Callable) -> Callable:
    """Adds the options to a command, which gets them as one keyword argument, `job`: a `Job`."""
    names = [field.name for field in fields(Job)]
    options = (flags.verify, flags.manifest, flags.dry_run, flags.resume, flags.force, flags.threads, flags.as_json)
    return flags.gathered(options, names, "job", lambda values: Job(**values))(command)
