"""`ggufmill hash`: digests of tensors and files, or a check against a manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path, PureWindowsPath
from typing import Any

from ...data_classes import dataclass
from ...errors import CheckFailed, PlanError
from ...formats import GGUFFile, open_gguf
from ...formats.hashes import ALGORITHMS, Hashes, escape_line_breaks, hash_file, read_manifest
from ...jobs.atomic_write import write_lines
from ...jobs.streamed_json import StreamedJson
from ...operating_system.processors import available_cpus
from ..common.arguments import check_new, refuse_inputs
from ..common.progress import Stage, reporting
from ..common.shown import shown
from ..requests.files import HashRequest
from ..requests.verb import verb


@shown
@dataclass
class HashResult(StreamedJson):
    """Digests, and if they were checked how each compares with the manifest.

    files     paths of the model's files
    hashes    one per tensor and algorithm, then one per file and algorithm
    manifest  that they were compared with; None: they were not
    verdicts  of each hash, in the same order: 'Ok', 'Mismatch' or 'Not Found'
    bad       'NAME (ALGORITHM): VERDICT' of what is not 'Ok', and of entries of the manifest that the file lacks
    """

    files: list[Path]
    hashes: Hashes = field(default_factory=Hashes)
    manifest: Path | None = None
    verdicts: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)

    def json_fields(self) -> dict[str, Any]:
        """What --json prints: files, hashes, and of a check manifest, checked (how many) and bad."""
        summary: dict[str, Any] = {
            "files": [str(path) for path in self.files],
            "hashes": ({"algorithm": h.algorithm, "hash": h.digest, "name": h.name} for h in self.hashes),
        }
        if self.manifest is not None:
            summary |= {"manifest": str(self.manifest), "checked": len(self.hashes), "bad": self.bad}
        return summary


@verb(HashRequest)
def hash_model(request: HashRequest) -> HashResult:
    """Hashes every tensor of a GGUF file and all its tensors together, as llama.cpp's gguf-hash does.

    Returns a `HashResult`. Raises CheckFailed when a hash is not as the manifest says, PlanError for a manifest of another
    file or without the algorithms asked for, FormatError for a file that cannot be read.

    Example:
        >>> from ggufmill import convert_model, hash_model
        >>> from ggufmill.recipes import FOLDER
        >>> _ = convert_model(FOLDER / "demo", "demo.gguf", outtype="q8_0", force=True)
        >>> _ = hash_model("demo.gguf", output="demo.manifest", force=True)
        >>> set(hash_model("demo.gguf", check="demo.manifest").verdicts)
        {'Ok'}
    """
    opened = open_gguf(Path(request.file))
    manifest = Path(request.check) if request.check is not None else None
    if request.output is not None:
        refuse_inputs([Path(request.output)], [*opened.paths, *([manifest] if manifest is not None else [])])
        check_new(Path(request.output), request.force)
    asked = {"xxh64": request.xxh64, "sha1": request.sha1, "sha256": request.sha256}
    wanted = [name for name in ALGORITHMS if request.all or asked[name]]
    expected: dict[tuple[str, str], str] = {}
    if manifest is not None:
        expected = _expected(manifest, opened)
        wanted = _algorithms_of(manifest, expected, wanted, request.all)
    elif not wanted and not request.uuid:
        wanted = ["xxh64"]
    result = HashResult(opened.paths, manifest=manifest)
    with reporting(request.progress) as report:
        stage = Stage(report, "hash", sum(info.nbytes for info in opened.tensors.values()))
        algorithms = [*wanted, "uuid"] if request.uuid and manifest is None else wanted
        threads = available_cpus()
        for entry in hash_file(opened, algorithms, layers=not request.no_layer, progress=stage.advance, threads=threads):
            result.hashes.append(entry)
            if manifest is not None:
                digest = expected.pop((entry.algorithm, _without_folder(entry.name)), None)
                result.verdicts.append("Not Found" if digest is None else "Ok" if digest == entry.digest else "Mismatch")
                if result.verdicts[-1] != "Ok":
                    result.bad.append(f"{entry.name} ({entry.algorithm}): {result.verdicts[-1]}")
    total = len(result.hashes)
    if manifest is not None and not request.no_layer:
        missing = [f"{name} ({a}): in the manifest, not in the file" for a, name in expected if a in wanted]
        result.bad += missing
        total += len(missing)
    if request.output is not None:
        write_lines(Path(request.output), (entry.line() for entry in result.hashes))
    if result.bad:
        raise CheckFailed(
            f"{len(result.bad)} of {total} hashes are not as {manifest} says, the first is {result.bad[0]}", result
        )
    return result


def _expected(manifest: Path, opened: GGUFFile) -> dict[tuple[str, str], str]:
    """(algorithm, name without folder) -> digest. Raises PlanError for the manifest of another file."""
    expected = {(algorithm, _without_folder(name)): digest for (algorithm, name), digest in read_manifest(manifest).items()}
    files = [_without_folder(escape_line_breaks(str(path))) for path in opened.paths]
    named = {name.partition(".gguf:")[0].removesuffix(".gguf") + ".gguf" for _, name in expected}
    if len(files) == len(named) == 1 and (before := named.pop()) != files[0]:  # a file that was renamed
        renamed = {name: files[0] + name[len(before) :] for _, name in expected if name.startswith(before)}
        expected = {(algorithm, renamed.get(name, name)): digest for (algorithm, name), digest in expected.items()}
    if not any(name == file or name.startswith(f"{file}:") for _, name in expected for file in files):
        other = next(name for _, name in expected).partition(":")[0]
        raise PlanError(f"{manifest} is of {other}, not of {files[0]}: a file is checked by the name it had when hashed")
    return expected


def _algorithms_of(
    manifest: Path, expected: Mapping[tuple[str, str], str], wanted: Sequence[str], any_of_them: bool
) -> list[str]:
    """Algorithms to check by. Raises PlanError for one that the manifest lacks, unless any of them will do."""
    present = [name for name in ALGORITHMS if any(algorithm == name for algorithm, _ in expected)]
    absent = [name for name in wanted if name not in present]
    if absent and not any_of_them:
        raise PlanError(f"{manifest} has no {absent[0]}; it has {', '.join(present)}")
    return [name for name in wanted if name in present] or present[-1:]


def _without_folder(name: str) -> str:
    """FILE or FILE:TENSOR without the folder of FILE."""
    file, separator, tensor = name.partition(".gguf:")
    return PureWindowsPath(file).name + separator + tensor  # a manifest may come from any system
