"""How a plan is carried out, whatever verb made it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import TYPE_CHECKING

from ...data_classes import dataclass
from ..requests.groups import OutputOptions

if TYPE_CHECKING:
    from ..cluster.writing import ClusterCall
    from ..tuning.tuning import Tuning
    from .forecast import Timing
    from .sequential import SequentialEncoding


@dataclass(frozen=True)
class WriteOptions:
    """How a plan is carried out, whatever verb made it.

    verify    samples of what was written are compared with the source (quantize/verify.py)
    manifest  sha256 of every tensor is written next to the output, as OUT.manifest
    dry_run   the plan is made and nothing is written
    resume    an interrupted job is continued
    force     an existing output is replaced
    threads   workers; None: one per processor
    shards    files of the plan to write, counted from 1; None: all
    cluster   other machines do the work; None: this one does
    sequential  matrices are encoded one after the other; None: in any order
    tuning    what is continuous in the written tensors is tuned before the files get their names; None: that of `sequential`
    is_timed  whether --dry-run says seconds; timing: what predicts them, and those that are left of a job; None: the speeds of
              the types' encoders
    """

    verify: bool = False
    manifest: bool = False
    dry_run: bool = False
    resume: bool = False
    force: bool = False
    threads: int | None = None
    shards: Collection[int] | None = None
    cluster: ClusterCall | None = None
    sequential: SequentialEncoding | None = None
    tuning: Tuning | None = None
    is_timed: bool = True
    timing: Timing | None = None


def write_options(
    request: OutputOptions, cluster: ClusterCall | None = None, shards: Collection[int] | None = None
) -> WriteOptions:
    """How the plan of a request is carried out."""
    asked = {
        field.name: getattr(request, field.name)
        for field in fields(WriteOptions)
        if field.name not in ("shards", "cluster", "sequential", "tuning", "is_timed", "timing")
    }
    return WriteOptions(**asked, shards=shards, cluster=cluster)
