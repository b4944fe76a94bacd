"""What the verbs that rewrite GGUF files can be asked for: `repack`, `split`, `merge`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ...formats.loaders import PROGRAMS
from ...jobs.patterns import NamePattern
from ...request_fields import argument, option, request
from ..common.arguments import Pattern, as_pattern
from .groups import OutputOptions, Splits


@request
class RepackRequest(OutputOptions):
    source: str | Path = argument("A GGUF file, or any shard of a split one.", kind="file", kw_only=False)
    out: str | Path = argument("The file to write.", kind="out", kw_only=False)
    pattern: Pattern | Sequence[Pattern] = option(
        "Repack only tensors whose name this matches anywhere; may be given again.",
        default=(),
        kind="regexes",
        key="repack.pattern",
    )
    undo: bool = option("Turn repacked tensors back into their base types.", default=False)
    keep_split: bool = option("Write as many files as the source has, with the same tensors.", default=False)
    program: str | None = option(
        "Refuse tensors that this program would not load.",
        default=None,
        flags="--for",
        choices=PROGRAMS,
    )


def repack_patterns(request: RepackRequest, where: str) -> list[str]:
    """The patterns of a request as text. Raises PlanError, beginning with `where`, for one that is none."""
    given = request.pattern
    patterns = [given] if isinstance(given, str | re.Pattern | NamePattern) else given
    return [as_pattern(each, where).text for each in patterns]


@request
class SplitRequest(Splits, OutputOptions):
    source: str | Path = argument("A GGUF file, or any shard of a split one.", kind="file", kw_only=False)
    out: str | Path = argument("The name before the number; .gguf at its end is left out.", kind="out", kw_only=False)
    split_max_tensors: int | None = option(
        "Split after this many tensors.", default=None, least=1, shown="128, or no limit with --split-max-size"
    )


@request
class MergeRequest(OutputOptions):
    source: str | Path = argument("Any of the shards; all have to be there.", kind="shards", kw_only=False)
    out: str | Path = argument("The file to write.", kind="out", kw_only=False)
    delete_source_shards: bool = option(
        "DELETE each file of the split once all its tensors are written.",
        doc="DELETES each shard once all its tensors are written and on disk: the disk has to hold the model and a shard, not "
        "both models.",
        default=False,
        flags="--delete-splits --delete-source-shards",
    )
