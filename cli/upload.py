"""`ggufmill upload` sends a folder of quants to the Hub."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from ..pipeline.common.figures import size_text
from ..pipeline.requests.run import UploadRequest
from .command import Verb
from .display.console import call, table
from .display.messages import is_quiet
from .options.fields import options_of

if TYPE_CHECKING:
    from ..pipeline.upload import UploadResult


@click.command(cls=Verb)
@options_of(UploadRequest)
def command(**options: Any) -> None:
    """Send the models of FOLDER, their imatrix, SHA256SUMS, model card (README.md) and report to a repository of the Hub.

    FOLDER is the output of `ggufmill run`, or any folder with GGUF files. All files are read and compared with SHA256SUMS
    first; nothing that is unfinished is sent. What the repository has already is not sent again, so that the same command
    resumes an upload that broke off. In the model card OWNER/NAME becomes the repository.

    The token is the one of huggingface-hub: `hf auth login`, or the variable HF_TOKEN. HF_ENDPOINT names another Hub.

    \b
    Examples:
      ggufmill upload demo-quants/ --repo me/demo-GGUF
      ggufmill upload demo-quants/ --repo me/demo-GGUF --public --yes
    """
    from ..pipeline.upload import upload_folder

    if is_quiet():
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # read when huggingface-hub is imported
    call(upload_folder, show=_text, **options)


def _text(result: UploadResult) -> str:
    rows = [(file.name, f"{file.nbytes:,}", file.sha256, file.status) for file in result.files]
    kind = "private" if result.private else "public"
    where = f"{result.url} ({kind}{', new' if result.exists is False else ''})"
    if result.sent:
        last = where
    elif result.missing_bytes:
        last = f"{size_text(result.missing_bytes)} would be sent to {where}; nothing was sent: give --yes to send it"
        last += f"\nnote: {result.offline}; what the repository has already is not known" if result.offline else ""
    else:
        last = f"nothing is to be sent: {where} has all of it"
    return "\n\n".join([table(("file", "bytes", "sha256", "status"), rows), last])
