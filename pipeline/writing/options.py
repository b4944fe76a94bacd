"""The arguments that every verb which carries out a plan takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WriteOptions:
    """How a plan is carried out, whatever verb made it.

    verify    samples of what was written are compared with the source (quantize/verify.py)
    manifest  sha256 of every tensor is written beside the output, as OUT.manifest
    dry_run   the plan is made and nothing is written
    resume    an interrupted job is continued
    force     an existing output is replaced
    threads   workers; None: one per processor
    """

    verify: bool = False
    manifest: bool = False
    dry_run: bool = False
    resume: bool = False
    force: bool = False
    threads: int | None = None
