"""Repositories of the Hugging Face hub: hf:OWNER/NAME[@REVISION], downloaded into the hub's own cache or read remotely.

Only what a conversion needs is fetched: config, tokenizer, model card, index and safetensors. huggingface-hub resumes broken
downloads; hashes are checked here. A token is taken from where huggingface-hub looks for it (HF_TOKEN, or a login), and sent
to the hub alone. HF_ENDPOINT names another hub.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from ...formats import FormatError, PlanError
from ...formats.deleted_shards import record_path
from ...formats.safetensors import ShardOpener, StoredTensor, shard_names
from ...simd.kernel_cache import cache_home
from ..checkpoint import TOKENIZER_FILES
from .remote import CONNECTIONS, ReadAhead, RemoteShard, Transport

PREFIX = "hf:"
_REPOSITORY = re.compile(r"hf:([\w.-]+(?:/[\w.-]+)?)(?:@([\w./-]+))?", re.ASCII)
# What is fetched beside the weights, where the repository has it. No folder but the templates' is looked into.
_SMALL = (
    "config.json",
    "generation_config.json",
    "README.md",
    "*.safetensors.index.json",
    *TOKENIZER_FILES,
    "tekken.json",
    "*.tiktoken",
    "tiktoken.model",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "hf_quant_config.json",
    "quantize_config.json",
)


@dataclass(frozen=True)
class Fetched:
    """A repository at one commit.

    folder  of the small files and, unless they are read remotely, of the shards
    shards  name -> its directory, where they are read remotely, else None
    origin  what identifies remote shards, else ''
    expect  see `Checkpoint`
    """

    name: str
    folder: Path
    shards: dict[str, ShardOpener] | None = None
    origin: str = ""
    expect: Callable[[list[StoredTensor]], None] | None = None


@dataclass(frozen=True)
class _File:
    name: str
    size: int
    sha256: str | None  # of a large file
    sha1: str | None  # git's, of the others


def is_repository(source: str | Path) -> bool:
    return str(source).startswith(PREFIX)


def parse_repository(text: str) -> tuple[str, str | None]:
    """'hf:OWNER/NAME@REVISION' -> ('OWNER/NAME', 'REVISION'), None without one. Raises PlanError."""
    match = _REPOSITORY.fullmatch(text)
    if match is None:
        raise PlanError(f"{text!r} names no repository; write hf:OWNER/NAME or hf:OWNER/NAME@REVISION")
    return match[1], match[2]


def fetch_repository(text: str, *, remote: bool = False) -> Fetched:
    """Brings the files of a repository here; remote: all but the shards, whose tensors are read as they are needed.

    Raises FormatError or MillError, in one line, for a repository, revision or file that cannot be had or is not what the hub
    says, and for one without safetensors.
    """
    repo, revision = parse_repository(text)
    hub = _Hub(repo)
    commit, files = hub.list(revision)
    small = [f for f in files.values() if any(_fits(f.name, pattern) for pattern in _SMALL)]
    folder = hub.download(commit, small)
    names = _shards(folder, files)
    if not names:
        raise FormatError(f"{text}: there are no safetensors in this repository")
    missing = [name for name in names if name not in files]
    if missing:
        raise FormatError(f"{text}: {len(missing)} of {len(names)} shards are missing, the first is {missing[0]}")
    named = f"{PREFIX}{repo}@{commit[:12]}"
    wanted = [files[name] for name in names]
    if not remote:
        hub.download(commit, [f for f in wanted if not record_path(folder / f.name).exists() or (folder / f.name).exists()])
        return Fetched(named, folder)
    ahead = ReadAhead(Transport(hub.token))
    shards = {f.name: RemoteShard(hub.url(commit, f.name), f.size, ahead) for f in wanted}
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        found = dict(zip(shards, pool.map(lambda item: item[1].directory(folder / item[0]), shards.items()), strict=True))
    openers: dict[str, ShardOpener] = {name: partial(found.__getitem__, name) for name in found}
    origin = json.dumps([repo, commit, [[f.name, f.size, f.sha256] for f in wanted]])
    return Fetched(named, folder, openers, origin, ahead.expect)


def _fits(name: str, pattern: str) -> bool:
    return name.count("/") == pattern.count("/") and fnmatch(name, pattern)


def _shards(folder: Path, files: Iterable[str]) -> list[str]:
    """Names of the shards: those of the index, else model.safetensors, else all in the top folder."""
    index = shard_names(folder)
    if index is not None:
        return sorted(set(index.values()))
    there = sorted(name for name in files if _fits(name, "*.safetensors"))
    return ["model.safetensors"] if "model.safetensors" in there else there


class _Hub:
    """Calls of huggingface-hub for one repository, their errors in one line each."""

    def __init__(self, repo: str):
        from huggingface_hub import constants, get_token

        self.repo = repo
        self.endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
        self.token = get_token()

    def url(self, commit: str, name: str) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self.repo, name, revision=commit, endpoint=self.endpoint)

    def list(self, revision: str | None) -> tuple[str, dict[str, _File]]:
        """The commit that a revision is, and its files by name."""
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self.endpoint, token=self.token or False)
        info = self._ask(lambda: api.model_info(self.repo, revision=revision, files_metadata=True, timeout=60.0))
        files = {}
        for s in info.siblings or []:
            sha256 = getattr(s.lfs, "sha256", None) if s.lfs is not None else None
            files[s.rfilename] = _File(s.rfilename, int(s.size or 0), sha256, None if s.lfs is not None else s.blob_id)
        if not info.sha:
            raise FormatError(f"{PREFIX}{self.repo}: the hub names no commit")
        return info.sha, files

    def download(self, commit: str, files: list[_File]) -> Path:
        """The folder in the hub's cache that holds these files, whose hashes were compared."""
        from huggingface_hub import snapshot_download

        folder = self._ask(
            lambda: snapshot_download(
                self.repo,
                revision=commit,
                allow_patterns=[glob.escape(f.name) for f in files] or ["\0"],
                token=self.token or False,
                endpoint=self.endpoint,
                max_workers=CONNECTIONS,
            )
        )
        for file in files:
            self._check(Path(folder) / file.name, file)
        return Path(folder)

    def _check(self, path: Path, file: _File) -> None:
        """Raises FormatError for a file that is not what the hub says, and removes it. A good one is remembered."""
        found = path.stat()
        kept = cache_home() / "verified" / (file.sha256 or file.sha1 or "unknown")
        line = f"{found.st_size} {found.st_mtime_ns}"
        if kept.exists() and kept.read_text() == line:
            return
        good = file.size == found.st_size
        if good and (file.sha256 or file.sha1):
            good = _digest(path, git=file.sha256 is None) == (file.sha256 or file.sha1)
        if not good:
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise FormatError(f"{path}: is not the file that the hub has (size or hash); it was removed: download it again")
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(line)

    def _ask(self, call: Callable[[], Any]) -> Any:
        """Raises FormatError with the reason in one line: never a header, which could hold the token."""
        from huggingface_hub import errors

        reasons: tuple[tuple[type[BaseException], str], ...] = (
            (errors.GatedRepoError, "access has to be asked for on the hub, and a token given in HF_TOKEN"),
            (errors.RepositoryNotFoundError, "there is no such repository, or it is private and needs a token in HF_TOKEN"),
            (errors.RevisionNotFoundError, "there is no such revision"),
            (errors.EntryNotFoundError, "a file of it is not there"),
            (errors.HFValidationError, "this is no name of a repository"),
        )
        try:
            return call()
        except Exception as error:
            known = next((text for kind, text in reasons if isinstance(error, kind)), None)
            if known is None:
                known = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}"
                if self.token:
                    known = known.replace(self.token, "***")
            raise FormatError(f"{PREFIX}{self.repo}: {known} (asked {self.endpoint})") from None


def _digest(path: Path, *, git: bool) -> str:
    """sha256 in hex, or git's sha1 of a blob."""
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode()) if git else hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
