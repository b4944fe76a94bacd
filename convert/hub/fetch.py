"""Repositories on the Hugging Face hub: hf:OWNER/NAME[@REVISION], downloaded into the hub's cache or read remotely.

Only what a conversion needs is fetched: config, tokenizer, model card, index and safetensors. huggingface-hub resumes broken
downloads; hashes are checked here. The token is the one that huggingface-hub uses (HF_TOKEN, or a login), and is sent to the
hub only. HF_ENDPOINT selects another hub.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from ...data_classes import dataclass
from ...formats import FormatError, PlanError
from ...formats.deleted_shards import record_path
from ...formats.safetensors import ShardOpener, StoredTensor, shard_names
from ...operating_system.files import cache_home

# Files in addition to config.json and the weights; a checkpoint may have any of them.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "tekken.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "qwen.tiktoken",
    "hy.tiktoken",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "vocab.txt",
    "generation_config.json",
    "hf_quant_config.json",
    "modules.json",
)
PREFIX = "hf:"
_REPOSITORY = re.compile(r"hf:([\w.-]+(?:/[\w.-]+)?)(?:@([\w./-]+))?", re.ASCII)
# What is fetched with the weights, if the repository has it; of folders only those of chat templates and of the modules of
# sentence-transformers.
_SMALL_FILES = (
    "config.json",
    "README.md",
    "*.safetensors.index.json",
    *TOKENIZER_FILES,
    "*.tiktoken",
    "tiktoken.model",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "hf_quant_config.json",
    "quantize_config.json",
    "[0-9]_*/config.json",  # of sentence-transformers: the pooling, dense layers
    "[0-9]_*/model.safetensors",
)


@dataclass(frozen=True)
class FetchedRepository:
    """A repository at one commit, or a folder.

    name      for the user
    folder    with the small files and, unless they are read remotely, the shards
    shards    file name -> opener, if they are read remotely, else None
    origin    identifies remote shards, else ''
    prefetch  see `Checkpoint`
    """

    name: str
    folder: Path
    shards: dict[str, ShardOpener] | None = None
    origin: str = ""
    prefetch: Callable[[list[StoredTensor]], None] | None = None


@dataclass(frozen=True)
class _File:
    """A file of a repository: its name, size in bytes, and sha256 (of large files) or git's sha1 (of others)."""

    name: str
    size: int
    sha256: str | None
    sha1: str | None


def is_repository(source: str | Path) -> bool:
    """Whether a source is written as hf:..."""
    return str(source).startswith(PREFIX)


def parse_repository(text: str) -> tuple[str, str | None]:
    """'hf:OWNER/NAME@REVISION' -> ('OWNER/NAME', 'REVISION'); None without a revision. Raises PlanError."""
    match = _REPOSITORY.fullmatch(text)
    if match is None:
        raise PlanError(f"{text!r} names no repository; write hf:OWNER/NAME or hf:OWNER/NAME@REVISION")
    return match[1], match[2]


def fetch_repository(text: str, *, remote: bool = False) -> FetchedRepository:
    """Downloads a repository; remote: without its shards, of which only the headers are read.

    Raises FormatError or MillError for a repository, revision or file that cannot be fetched or does not match the hub's
    hash, and for a repository without safetensors.
    """
    repo, revision = parse_repository(text)
    hub = Hub(repo)
    commit, files = hub.list(revision)
    small_files = [f for f in files.values() if any(_matches(f.name, pattern) for pattern in _SMALL_FILES)]
    folder = hub.download(commit, small_files)
    names = _shard_names(folder, files)
    if not names:
        raise FormatError(f"{text}: there are no safetensors in this repository")
    missing = [name for name in names if name not in files]
    if missing:
        raise FormatError(f"{text}: {len(missing)} of {len(names)} shards are missing, the first is {missing[0]}")
    display_name = f"{PREFIX}{repo}@{commit[:12]}"
    shard_files = [files[name] for name in names]
    if not remote:
        is_deleted = {f: record_path(folder / f.name).exists() and not (folder / f.name).exists() for f in shard_files}
        hub.download(commit, [f for f in shard_files if not is_deleted[f]])
        return FetchedRepository(display_name, folder)
    from .http_ranges import Transport  # the modules of HTTP take longer to import than a local file's header to read
    from .remote_shards import CONNECTIONS, Prefetcher, RemoteShard

    prefetcher = Prefetcher(Transport(hub.token))
    shards = {f.name: RemoteShard(hub.url(commit, f.name), f.size, prefetcher) for f in shard_files}
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        headers = pool.map(lambda item: item[1].read_header(folder / item[0]), shards.items())
        tensors = dict(zip(shards, headers, strict=True))
    openers: dict[str, ShardOpener] = {name: partial(tensors.__getitem__, name) for name in tensors}
    origin = json.dumps([repo, commit, [[f.name, f.size, f.sha256] for f in shard_files]])
    return FetchedRepository(display_name, folder, openers, origin, prefetcher.plan)


def _matches(name: str, pattern: str) -> bool:
    return name.count("/") == pattern.count("/") and fnmatch(name, pattern)


def _shard_names(folder: Path, files: Iterable[str]) -> list[str]:
    """Names of the shards: those in the index, else model.safetensors, else all in the top folder."""
    index = shard_names(folder)
    if index is not None:
        return sorted(set(index.values()))
    names = sorted(name for name in files if _matches(name, "*.safetensors"))
    return ["model.safetensors"] if "model.safetensors" in names else names


class UnreachableHub(FormatError):
    """There is no connection to the hub, or huggingface-hub is told not to use one (HF_HUB_OFFLINE)."""


class Hub:
    """huggingface-hub for one repository, with its exceptions as errors of one line."""

    def __init__(self, repo: str):
        from huggingface_hub import constants, get_token

        self.repo = repo
        self.endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
        self.token = get_token()

    def url(self, commit: str, name: str) -> str:
        """Where a file can be fetched."""
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self.repo, name, revision=commit, endpoint=self.endpoint)

    def list(self, revision: str | None) -> tuple[str, dict[str, _File]]:
        """(commit of a revision, its files by name). Raises FormatError if the hub names no commit."""
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self.endpoint, token=self.token or False)
        info = self.call(lambda: api.model_info(self.repo, revision=revision, files_metadata=True, timeout=60.0))
        files = {}
        for s in info.siblings or []:
            sha256 = getattr(s.lfs, "sha256", None) if s.lfs is not None else None
            files[s.rfilename] = _File(s.rfilename, int(s.size or 0), sha256, None if s.lfs is not None else s.blob_id)
        if not info.sha:
            raise FormatError(f"{PREFIX}{self.repo}: the hub names no commit")
        return info.sha, files

    def download(self, commit: str, files: list[_File]) -> Path:
        """Downloads files and checks their hashes; returns the folder in the hub's cache."""
        import glob

        from huggingface_hub import snapshot_download

        from .remote_shards import CONNECTIONS

        folder = self.call(
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
        """Records a file with the hub's size and hash, so that it is checked once. Removes any other and raises FormatError."""
        stat = path.stat()
        record = cache_home() / "verified" / (file.sha256 or file.sha1 or "unknown")
        line = f"{stat.st_size} {stat.st_mtime_ns}"
        if record.exists() and record.read_text() == line:
            return
        is_correct = file.size == stat.st_size
        if is_correct and (file.sha256 or file.sha1):
            is_correct = digest(path, git=file.sha256 is None) == (file.sha256 or file.sha1)
        if not is_correct:
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise FormatError(f"{path}: is not the file that the hub has (size or hash); it was removed: download it again")
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(line)

    def call(self, function: Callable[[], Any]) -> Any:
        """Calls a function of huggingface-hub. Raises FormatError with the reason in one line, in which no token may occur, and
        UnreachableHub where there is no connection."""
        from huggingface_hub import errors

        reasons: tuple[tuple[type[BaseException], str], ...] = (
            (errors.GatedRepoError, "access has to be asked for on the hub, and a token given in HF_TOKEN"),
            (errors.RepositoryNotFoundError, "there is no such repository, or it is private and needs a token in HF_TOKEN"),
            (errors.RevisionNotFoundError, "there is no such revision"),
            (errors.EntryNotFoundError, "one of its files does not exist"),
            (errors.HFValidationError, "this is no name of a repository"),
        )
        try:
            return function()
        except Exception as error:
            reason = next((text for error_type, text in reasons if isinstance(error, error_type)), None)
            is_away = _is_of_connection(error) and not isinstance(error, errors.HfHubHTTPError)
            if is_away:
                said = str(error).strip().splitlines() or [type(error).__name__]
                raise UnreachableHub(f"the hub cannot be reached at {self.endpoint} ({said[0][:200]})") from None
            if reason is None:
                reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}"
                if self.token:
                    reason = reason.replace(self.token, "***")
            raise FormatError(f"{PREFIX}{self.repo}: {reason} (asked {self.endpoint})") from None


def _is_of_connection(error: Exception) -> bool:
    """Whether an exception tells of a missing connection: Python's own, requests' or httpx'."""
    names = {base.__name__ for base in type(error).__mro__}
    return isinstance(error, ConnectionError | TimeoutError) or bool(names & {"TransportError", "RequestException", "gaierror"})


def digest(content: Path | bytes, *, git: bool) -> str:
    """sha256 of a file or of bytes in hex, or (git) the sha1 of its git blob."""
    size = len(content) if isinstance(content, bytes) else content.stat().st_size
    made = hashlib.sha1(f"blob {size}\0".encode()) if git else hashlib.sha256()
    with BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file:
        while block := file.read(1 << 22):
            made.update(block)
    return made.hexdigest()
