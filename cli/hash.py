"""`ggufmill hash` makes digests of files, tensors and layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..formats import MillError, PlanError, open_gguf
from ..pipeline.console import byte_progress, emit
from ..pipeline.write_model import check_new, protect
from .options import flags

ALGORITHMS = ("xxh64", "sha1", "sha256")  # of formats.hashes, the strongest last


def _algorithm_options(command: Any) -> Any:
    for name in reversed(ALGORITHMS):
        command = click.option(f"--{name}", is_flag=True, help=f"Use {name}." + " [the default]" * (name == "xxh64"))(command)
    return command


@click.command(short_help="Hash tensors and files, or check them")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_algorithm_options
@click.option("--all", "every", is_flag=True, help="Use all of these.")
@click.option("--uuid", is_flag=True, help="A UUIDv5 of the file's tensors.")
@click.option("--no-layer", is_flag=True, help="Only the files, not each tensor.")
@click.option("-o", "--output", type=flags.OUT_FILE, help="Write the manifest to this file.")
@click.option(
    "-c", "--check", "manifest", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Compare with a manifest."
)
@flags.force
@flags.as_json
def command(
    file: Path,
    every: bool,
    uuid: bool,
    no_layer: bool,
    output: Path | None,
    manifest: Path | None,
    force: bool,
    as_json: bool,
    **chosen: bool,
) -> None:
    """Hashes of every tensor of the GGUF FILE and of all its tensors together, in the lines of llama.cpp's gguf-hash.

    Of a split model all shards are hashed, each as a file. --check goes by the strongest hash that the manifest has, unless one
    is named; names are compared without their folder.

    \b
    Examples:
      ggufmill hash model.gguf --all -o model.gguf.manifest
      ggufmill hash model.gguf --check model.gguf.manifest
    """
    from ..formats.hashes import Hash, escape_line_breaks, hash_file, read_manifest
    from ..jobs.atomic_write import write_text

    opened = open_gguf(file)
    if output is not None:
        protect([output], [*opened.paths, *([manifest] if manifest is not None else [])])
        check_new(output, force)
    wanted = [name for name in ALGORITHMS if every or chosen[name]]
    expected: dict[tuple[str, str], str] = {}
    if manifest is not None:
        expected = {(algorithm, _bare(name)): digest for (algorithm, name), digest in read_manifest(manifest).items()}
        there = [name for name in ALGORITHMS if any(algorithm == name for algorithm, _ in expected)]
        own = [_bare(escape_line_breaks(str(path))) for path in opened.paths]
        if not any(name == file or name.startswith(f"{file}:") for _, name in expected for file in own):
            other = next(name for _, name in expected).partition(":")[0]
            raise PlanError(f"{manifest} is of {other}, not of {own[0]}: a file is checked by the name it had when hashed")
        absent = [name for name in wanted if name not in there]
        if absent and not every:
            raise PlanError(f"{manifest} has no {absent[0]}; it has {', '.join(there)}")
        wanted = [name for name in wanted if name in there] or there[-1:]
    elif not wanted and not uuid:
        wanted = ["xxh64"]
    nbytes = sum(info.nbytes for info in opened.tensors.values())
    found: list[Hash] = []
    lines: list[str] = []
    bad: list[str] = []
    with byte_progress(nbytes, "hash") as progress:
        algorithms = [*wanted, "uuid"] if uuid and manifest is None else wanted
        for entry in hash_file(opened, algorithms, layers=not no_layer, progress=progress):
            found.append(entry)
            line = entry.line()
            if manifest is not None:
                digest = expected.pop((entry.algorithm, _bare(entry.name)), None)
                verdict = "Not Found" if digest is None else "Ok" if digest == entry.digest else "Mismatch"
                line += f"  -  {verdict}"
                if verdict != "Ok":
                    bad.append(f"{entry.name} ({entry.algorithm}): {verdict}")
            lines.append(line)
    total = len(found)
    if manifest is not None and not no_layer:
        missing = [f"{name} ({a}): in the manifest, not in the file" for a, name in expected if a in wanted]
        bad, total = bad + missing, total + len(missing)
    if output is not None:
        write_text(output, "".join(f"{entry.line()}\n" for entry in found))
    summary: dict[str, Any] = {
        "files": [str(p) for p in opened.paths],
        "hashes": [{"algorithm": h.algorithm, "hash": h.digest, "name": h.name} for h in found],
    }
    if manifest is not None:
        summary |= {"manifest": str(manifest), "checked": len(found), "bad": bad}
    emit(summary, as_json, lambda: "\n".join(lines))
    if bad:
        raise MillError(f"{len(bad)} of {total} hashes are not as {manifest} says, the first is {bad[0]}")


def _bare(name: str) -> str:
    """FILE or FILE:TENSOR without the folder of FILE."""
    file, mark, tensor = name.partition(".gguf:")
    return Path(file).name + mark + tensor
