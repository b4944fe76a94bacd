"""What `run` and `upload` can be asked for."""

from __future__ import annotations

from pathlib import Path

from ...formats.loaders import PROGRAMS
from ...request_fields import argument, option, request
from ..common.progress import OnProgress


@request
class RunRequest:
    recipe: str | Path = argument(
        "A recipe's file, or the name of a bundled one; paths in it are relative to its folder.", kind="name", kw_only=False
    )
    out: str | Path | None = option(
        "Write the results to this folder.", default=None, flags="-o --out", kind="folder", shown="out/RECIPE", kw_only=False
    )
    force: bool = option("Repeat every stage, also those that are finished.", default=False)
    program: str | None = option(
        "Make only what this program loads: its types, its layout of latent attention, its fallbacks.",
        default=None,
        flags="--for",
        choices=PROGRAMS,
        shown="what the recipe says",
    )
    allow_nonfinite: bool = option("Write 0 for weights that are NaN or infinite, and count them.", default=False, rare=True)
    dry_run: bool = option("Show the plan with exact sizes; write nothing.", default=False)
    threads: int | None = option(
        "Use this many worker threads.", default=None, flags="-t --threads", least=1, shown="all processors"
    )
    cluster: str | None = option(
        "Divide the work among dask workers: tcp://HOST:PORT, a scheduler file, or local:N.", default=None, metavar="ADDRESS"
    )
    cluster_output: str | None = option(
        "Let workers write into OUT's folder, which all machines share, or send what they make.",
        default=None,
        choices=("shared", "collect"),
        shown="shared",
        rare=True,
    )
    progress: OnProgress | bool | None = option(
        "Call this with reports of 'imatrix' and 'validate' in windows, 'quantize', 'repack', 'verify' and "
        "'checksum' in bytes, and those of `search_recipe`.",
        default=None,
        in_cli=False,
    )


@request
class UploadRequest:
    folder: str | Path = argument("As `run_recipe` leaves it, or any with GGUF files.", kind="existing_folder", kw_only=False)
    repo: str = option("Send to this repository on the Hub; it is created if it does not exist.", metavar="OWNER/NAME")
    public: bool = option("Make a new repository public; an existing one stays what it is.", default=False)
    yes: bool = option("Send the files. Without this option, what would be sent is printed.", default=False)
    progress: OnProgress | bool | None = option("Call this with reports of 'checksum' in bytes.", default=None, in_cli=False)
