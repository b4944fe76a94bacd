"""What `recipes lint` and `recipes explain` can be asked for."""

from __future__ import annotations

from pathlib import Path

from ...request_fields import argument, option, request
from ..common.arguments import FileType
from .groups import SourceOptions


@request
class _Checked(SourceOptions):
    """What a recipe is checked with."""

    type: FileType | None = option(
        "Give tensors that no rule takes this file type.", default=None, kind="file_type", shown="the recipe's"
    )
    imatrix: str | Path | None = option("Check with this importance matrix, GGUF or .dat.", default=None, kind="file")


@request
class LintRequest(_Checked):
    recipe: str | Path = argument("A recipe's file, or the name of a bundled one.", kind="name", kw_only=False)
    model: str | Path | None = argument(
        "A GGUF file, a checkpoint's folder or hf:OWNER/NAME, of which the headers are read.",
        default=None,
        kind="source",
        kw_only=False,
    )
    strict: bool = option("Exit with 1 if there is any warning.", default=False)


@request
class ExplainRequest(_Checked):
    model: str | Path = argument(
        "A GGUF file, a checkpoint's folder or hf:OWNER/NAME, of which the headers are read.", kind="source", kw_only=False
    )
    recipe: str | Path | None = option(
        "Explain this recipe; without one, --type alone is explained.", default=None, kind="name", metavar="FILE"
    )
