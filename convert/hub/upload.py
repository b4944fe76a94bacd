"""Sending files to a repository of the hub: what it has, making it, and a commit of some files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from pathlib import Path

from ...data_classes import dataclass
from ...errors import PlanError
from .fetch import Hub, digest


@dataclass(frozen=True)
class HubRepository:
    """A repository as the hub has it. hashes: of its files by name, sha256 of large ones, git's sha1 of others."""

    exists: bool
    is_private: bool = False
    hashes: dict[str, str] = field(default_factory=dict)

    def has(self, name: str, content: Path | bytes, sha256: str) -> bool:
        """Whether it has a file of this content; sha256: of it."""
        known = self.hashes.get(name)
        return known == (sha256 if known is None or len(known) == 64 else digest(content, git=True))


def look_up(repo: str) -> HubRepository:
    """What the hub has. Raises UnreachableHub without a connection, FormatError when the hub refuses to say."""
    from huggingface_hub import HfApi

    hub = Hub(repo)
    api = HfApi(endpoint=hub.endpoint, token=hub.token or False)
    if not hub.call(lambda: api.repo_exists(repo)):
        return HubRepository(False)
    info = hub.call(lambda: api.model_info(repo))
    _, files = hub.list(None)
    hashes = {name: file.sha256 or file.sha1 or "" for name, file in files.items()}
    return HubRepository(True, bool(info.private), hashes)


def create(repo: str, *, private: bool) -> None:
    """Makes the repository. Raises PlanError without a token, FormatError when the hub refuses."""
    hub = _with_token(repo)
    from huggingface_hub import HfApi

    hub.call(lambda: HfApi(endpoint=hub.endpoint, token=hub.token).create_repo(repo, private=private, exist_ok=True))


def commit(repo: str, files: Sequence[tuple[str, Path | bytes]], message: str, *, bars: bool = False) -> None:
    """Sends files (name, content) in one commit. bars: the hub's own bars show how far it is.

    Raises PlanError without a token, FormatError when the hub refuses or the connection breaks.
    """
    hub = _with_token(repo)
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    api, without = HfApi(endpoint=hub.endpoint, token=hub.token), are_progress_bars_disabled()
    operations = [CommitOperationAdd(name, str(content) if isinstance(content, Path) else content) for name, content in files]
    if not bars:
        disable_progress_bars()
    try:
        hub.call(lambda: api.create_commit(repo, operations, commit_message=message))
    finally:
        if not without:
            enable_progress_bars()


def check_token(repo: str) -> None:
    """Raises PlanError without a token."""
    _with_token(repo)


def _with_token(repo: str) -> Hub:
    hub = Hub(repo)
    if not hub.token:
        raise PlanError(f"a token is needed to write to {repo}: `hf auth login`, or the variable HF_TOKEN")
    return hub
