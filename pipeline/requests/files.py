"""What the verbs that read files and change them without quantising can be asked for: `inspect`, `metadata`, `hash`,
`convert-endian`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...formats.loaders import PROGRAMS
from ...request_fields import argument, option, request
from ..common.arguments import Pattern
from ..common.progress import OnProgress


@request
class _Writing:
    force: bool = option("Replace an existing output.", default=False)
    progress: OnProgress | bool | None = option(
        "Call this with each `Progress` report, in bytes; True shows a bar.", default=None, in_cli=False
    )


@request
class InspectRequest:
    file: str | Path = argument("A GGUF file, or any shard of a split one.", kind="source", kw_only=False)
    check: bool = option("Decode every tensor and count NaN and infinite values.", default=False)
    checksums: bool = option("Compute the xxh3-64 of every tensor's bytes.", default=False)
    tensors: Pattern | None = option(
        "Show only tensors with a match in their name, and no metadata.",
        doc="Only the tensors with a match in their name.",
        default=None,
        kind="regex",
        shown="all",
    )
    arrays: bool = option(
        "Give long arrays in full in --json; otherwise they are shortened to their first values and their length.",
        doc="Long arrays of the metadata are given in full; else their first values and their length.",
        default=False,
    )
    program: str | None = option(
        "Check whether this program loads the file, as far as is known; the exit code is 1 if it does not.",
        doc="Whether this program loads the file, as far as is known, and what it computes otherwise.",
        default=None,
        flags="--for",
        choices=PROGRAMS,
    )
    progress: OnProgress | bool | None = option(
        "Call this with each `Progress` report, in bytes; True shows a bar.", default=None, in_cli=False
    )


@request
class MetadataRequest(_Writing):
    file: str | Path = argument("A GGUF file, or any shard of a split one.", kind="file", kw_only=False)
    out: str | Path | None = option(
        "Write this file instead of changing FILE.", default=None, flags="-o --output", kind="out_file", kw_only=False
    )
    set: Mapping[str, Any] | None = option(
        "Set KEY; without TYPE it keeps its type.",
        doc="Key -> value: a key that exists keeps its type, a new one takes that of the value; KEY:TYPE chooses one "
        "(uint8 to float64, bool, string, int32[] ...). A text stands for a number too, a JSON text for an array.",
        default=None,
        metavar="KEY[:TYPE]=VALUE",
    )
    set_file: Mapping[str, str | Path] | None = option(
        "Set KEY to the text in FILE.", doc="Key -> file whose text is the value.", default=None, metavar="KEY=FILE"
    )
    remove: Sequence[str] = option(
        "Remove KEY.", doc="Keys to leave out. The order is remove, rename, set.", default=(), metavar="KEY"
    )
    rename: Mapping[str, str] | None = option("Give KEY another name.", doc="Key -> new name.", default=None, metavar="KEY=NEW")
    dry_run: bool = option("Only show what would change.", default=False)


@request
class HashRequest(_Writing):
    file: str | Path = argument(
        "A GGUF file, or any shard of a split one: all shards are hashed, each as a file.", kind="file", kw_only=False
    )
    xxh64: bool = option(
        "Use xxh64, the default; --check uses the strongest hash of the manifest unless one is named.",
        default=False,
    )
    sha1: bool = option("Use sha1.", default=False)
    sha256: bool = option("Use sha256.", default=False)
    all: bool = option("Use all of these.", default=False)
    uuid: bool = option("Make a UUIDv5 of the tensors of each file.", default=False, rare=True)
    no_layer: bool = option("Hash only the files, not each tensor.", default=False, rare=True)
    output: str | Path | None = option("Write the manifest to this file.", default=None, flags="-o --output", kind="out_file")
    check: str | Path | None = option(
        "Compare with this manifest; names are compared without their folder, and the name of a single file may differ.",
        default=None,
        flags="-c --check",
        kind="file",
    )


@request
class EndianRequest(_Writing):
    file: str | Path = argument("One GGUF file, not a shard of a split model (merge it first).", kind="file", kw_only=False)
    out: str | Path = argument("The file to write.", kind="out_file", kw_only=False)
    dry_run: bool = option("Only check whether the file can be converted.", default=False)
