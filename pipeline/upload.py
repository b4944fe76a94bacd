"""`ggufmill upload`: a folder of quants, as `run` leaves it, is sent to a repository of the Hub."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

from ..convert.hub.fetch import Hub, UnreachableHub
from ..convert.hub.upload import HubRepository, check_token, commit, create, look_up
from ..data_classes import dataclass
from ..errors import FormatError, MillError, PlanError
from ..formats import open_gguf
from .common import checksums
from .common.messages import note
from .common.progress import OnProgress, reporting
from .common.shown import shown
from .reports.model_card import NOT_FIT, for_repository
from .requests.run import UploadRequest
from .requests.verb import verb
from .stages.cache import unfinished_stages

_TEXTS = ("README.md", "report.html", "report.md", checksums.NAME)  # sent last, in one commit
_DATA = (".gguf", ".imatrix")
_UNFINISHED = ("*.part", "*.journal")


@dataclass(frozen=True)
class UploadFile:
    """A file: its size in bytes, sha256 in hex, and 'to send', 'sent', or 'there' if the repository has it already."""

    name: str
    nbytes: int
    sha256: str
    status: str


@shown
@dataclass
class UploadResult:
    """What was sent, or without `yes` would be.

    repo       OWNER/NAME
    url        where it is
    exists     whether the repository was there before; None: the Hub could not be asked, which `offline` says why
    private    whether it is, or is to be, private
    files      in the order in which they are sent
    sent       whether anything was to be sent at all (`yes`)
    """

    repo: str
    url: str
    exists: bool | None
    private: bool
    files: list[UploadFile] = field(default_factory=list)
    sent: bool = False
    offline: str | None = None

    @property
    def missing_bytes(self) -> int:
        """Bytes of the files that the repository lacks."""
        return sum(file.nbytes for file in self.files if file.status == "to send")

    def as_json(self) -> dict[str, Any]:
        """What --json prints."""
        return asdict(self)


@verb(UploadRequest)
def upload_folder(request: UploadRequest) -> UploadResult:
    """Sends the models of a folder, their imatrix, checksums, model card and report to a repository of the Hub.

    Large files are commits of their own, and what the repository has with the same hash is not sent again: the same call goes
    on with an upload that broke off. What SHA256SUMS lists is sent if there is such a file, else every GGUF and imatrix; all
    are read and compared with it first. In the model card OWNER/NAME becomes the repository. Without `yes` and without a
    connection the result says what there is to send.

    While files are sent the bars are huggingface-hub's, and so is the token (`hf auth login`, HF_TOKEN); HF_ENDPOINT names
    another Hub.

    Returns an `UploadResult`. Raises PlanError for a folder with unfinished, missing or no files, FormatError for a file that
    is not as SHA256SUMS says, and when the Hub refuses.

    Example:
        >>> from ggufmill import upload_folder
        >>> upload_folder("no-such-folder", repo="me/model-GGUF")
        Traceback (most recent call last):
            ...
        ggufmill.errors.PlanError: no-such-folder is not a folder
    """
    folder, repo, public = Path(request.folder), request.repo, request.public
    paths = _models_and_texts(folder)
    if request.yes:
        check_token(repo)
    with reporting(request.progress) as report:
        contents = _checked(folder, paths, repo, report)
        remote, offline = _looked_up(repo, request.yes)
        is_private = remote.is_private if remote.exists else not public
        result = UploadResult(repo, _url(repo), None if offline else remote.exists, is_private, offline=offline)
        result.files = [_status(remote, name, content, digest) for name, (content, digest) in contents.items()]
        if remote.exists and public and remote.is_private:
            note(f"{repo} exists and stays private; its visibility can be changed on the Hub")
        if not request.yes:
            return result
        if not remote.exists:
            create(repo, private=not public)
        for names in _commits(result.files):
            _send(repo, names, contents, bars=bool(request.progress))
            result.files = [_sent(file) if file.name in names else file for file in result.files]
    result.sent = True
    return result


def _looked_up(repo: str, is_needed: bool) -> tuple[HubRepository, str | None]:
    """What the Hub has, and why it could not be asked. Raises UnreachableHub if it has to be."""
    try:
        return look_up(repo), None
    except UnreachableHub as error:
        if is_needed:
            raise
        return HubRepository(False), str(error)


def _models_and_texts(folder: Path) -> list[Path]:
    """What there is to send. Raises PlanError for what is unfinished or not there."""
    if not folder.is_dir():
        raise PlanError(f"{folder} is not a folder")
    left = next((path for pattern in _UNFINISHED for path in sorted(folder.glob(pattern))), None)
    if left is not None:
        raise PlanError(f"{left} is left from an unfinished job: finish it with the command that began it, or remove it")
    unfinished = unfinished_stages(folder / "state.json")
    if unfinished:
        raise PlanError(f"the run in {folder} is not finished ({', '.join(unfinished)}): the same `ggufmill run` continues it")
    listed = folder / checksums.NAME
    if listed.exists():
        paths = [folder / name for name in checksums.read_checksums(listed)]
        missing = next((path for path in paths if not path.is_file()), None)
        if missing is not None:
            raise PlanError(f"{listed} lists {missing.name}, which does not exist")
        others = [path.name for path in sorted(folder.glob("*.gguf")) if path not in paths]
        if others:
            note(f"not in {checksums.NAME} and so not sent: {', '.join(others)}")
    else:
        paths = sorted(path for path in folder.iterdir() if path.suffix in _DATA and path.is_file())
    if not any(path.suffix == ".gguf" for path in paths):
        raise PlanError(f"{folder} has no GGUF file to send")
    return [*paths, *(folder / name for name in _TEXTS if (folder / name).is_file())]


def _checked(folder: Path, paths: list[Path], repo: str, report: OnProgress) -> dict[str, tuple[Path | bytes, str]]:
    """File name -> (content, sha256). Raises PlanError for a model card that says so, and for splits with missing files,
    FormatError for damaged files."""
    card = folder / "README.md"
    if card.is_file() and NOT_FIT in card.read_text("utf-8"):
        raise PlanError(f"{card} says that the files are beyond the recipe's limits; change the recipe, or the card")
    for path in paths:
        if path.suffix == ".gguf":
            absent = [shard for shard in open_gguf(path).paths if shard.name not in [p.name for p in paths]]
            if absent:
                raise PlanError(f"{path.name} is one of several files, of which {absent[0].name} is not among those to send")
    digests = checksums.sha256_of(paths, report)
    listed = folder / checksums.NAME
    for name, expected in (checksums.read_checksums(listed) if listed.exists() else {}).items():
        if digests[name] != expected:
            raise FormatError(f"{folder / name} is not the file that {listed} lists: its sha256 is another")
    contents: dict[str, tuple[Path | bytes, str]] = {path.name: (path, digests[path.name]) for path in paths}
    if card.name in contents:
        text = for_repository(card.read_text("utf-8"), repo).encode()
        contents[card.name] = text, hashlib.sha256(text).hexdigest()
    return contents


def _status(remote: HubRepository, name: str, content: Path | bytes, sha256: str) -> UploadFile:
    nbytes = len(content) if isinstance(content, bytes) else content.stat().st_size
    return UploadFile(name, nbytes, sha256, "there" if remote.has(name, content, sha256) else "to send")


def _commits(files: list[UploadFile]) -> list[list[str]]:
    """Names of the files of each commit: models one by one, so that what has arrived stays; then all that tells of them."""
    missing = [file.name for file in files if file.status == "to send"]
    texts = [name for name in missing if name in _TEXTS]
    return [[name] for name in missing if name not in _TEXTS] + [texts] * bool(texts)


def _send(repo: str, names: list[str], contents: dict[str, tuple[Path | bytes, str]], *, bars: bool) -> None:
    note(f"sending {', '.join(names)}")
    try:
        commit(repo, [(name, contents[name][0]) for name in names], f"Upload {', '.join(names)} with ggufmill", bars=bars)
    except MillError as error:
        raise type(error)(f"{error}; what was sent is kept, the same command sends the rest") from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt("what was sent is kept, the same command sends the rest") from None


def _sent(file: UploadFile) -> UploadFile:
    return UploadFile(file.name, file.nbytes, file.sha256, "sent")


def _url(repo: str) -> str:
    return f"{Hub(repo).endpoint}/{repo}"
