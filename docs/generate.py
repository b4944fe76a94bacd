"""Writes the generated parts of the pages: the command line's reference and the tables of types.

python docs/generate.py            # writes docs/command-line.md and the marked parts of docs/formats/*.md
python docs/generate.py --check    # exits with 1 if a page is not current
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from textwrap import wrap

import click
import numpy as np

import ggufmill
from ggufmill import VERBS, module_of
from ggufmill.cli.options.sections import show_all
from ggufmill.formats import TYPES
from ggufmill.formats.layouts import layout_of, tables
from ggufmill.pipeline.requests.verb import documented
from ggufmill.runtime import Sampling, Settings

PAGES = Path(__file__).parent
SECTION = re.compile(r"^(?=[A-Z][a-z A-Z]+:\n  -)", re.MULTILINE)
_SHARED_BY, _SHARED_LINES = 3, 5  # what as many verbs have stands once, if it is as long
_OUTPUT = (
    "`-o` names the file or the folder that a verb writes, in every verb that writes one, and so do `--out`, `--output` and "
    "`--outfile`. Where the help has OUT as an argument, it may be given either way. `bench` and `sweep-bench` print their "
    "results unless `-o` names a file; as in llama-bench, the bare name of a format (`-o csv`) prints in that format."
)
MARKED = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def command_line() -> str:
    """The help of every verb, as a page."""
    lines = ["# Command line", "", "Generated from the commands themselves: `ggufmill VERB --help` says the same.", ""]
    lines += ["| verb | what it does |", "|---|---|"]
    lines += [f"| [`{verb}`](#{verb}) | {entry.summary} |" for verb, entry in VERBS.items()]
    lines += ["", *wrap(_OUTPUT, 160)]
    helps = {
        path: SECTION.split(text)
        for verb in VERBS
        for path, text in _help(import_module(f"ggufmill.cli.{module_of(verb)}").command, verb)
    }
    counts = Counter(section.strip() for _, *sections in helps.values() for section in sections)
    shared = [section for section, count in counts.items() if count >= _SHARED_BY and section.count("\n") >= _SHARED_LINES]
    users = {section: [path for path, (_, *own) in helps.items() if section in map(str.strip, own)] for section in shared}
    titles = {section: f"{section.partition(':')[0]} of {', '.join(users[section])}" for section in shared}
    for path, (head, *sections) in helps.items():
        own = "".join(section for section in sections if section.strip() not in shared)
        lines += ["", f"{'#' * (1 + len(path.split()))} {path}", "", "```text", (head + own).rstrip(), "```"]
        links = [
            f"[{section.partition(':')[0]}](#{_anchor(titles[section])})"
            for section in map(str.strip, sections)
            if section in shared
        ]
        lines += ["", f"And options that several verbs have: {', '.join(links)}."] * bool(links)
    lines += ["", "## Options that several verbs have"]
    for section in sorted(shared):
        lines += ["", f"### {titles[section]}", "", "```text", section.partition("\n")[2], "```"]
    return "\n".join(lines) + "\n"


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def _help(command: click.Command, path: str) -> Iterator[tuple[str, str]]:
    """(words of the command, its help), of its sub-commands too."""
    names = ["-h", "--help"]
    context = click.Context(
        command, info_name=f"ggufmill {path}", max_content_width=100, terminal_width=100, help_option_names=names
    )
    show_all(context)
    yield path, command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            sub = command.get_command(context, name)
            assert sub is not None
            yield from _help(sub, f"{path} {name}")


def types_table() -> str:
    """Every type that holds weights, a row each."""
    head = ("type", "id", "file type", "block", "bytes/block", "row meta", "rows", "bits/weight")
    head += ("imatrix", "fallback", "base", "interleaved")
    rows = []
    for kind in TYPES.values():
        bits = 8 * kind.block_bytes / kind.block
        cells = (kind.name, kind.id, kind.ftype, kind.block, kind.block_bytes, kind.row_meta, kind.rows, f"{bits:g}")
        cells += (kind.imatrix, kind.fallback, kind.base, kind.packed)
        rows.append(["" if cell is None else str(cell) for cell in cells])
    return _table(head, rows)


def value_tables() -> str:
    """The non-uniform tables, as rows of numbers."""
    named = [
        (f"{bits} bits", getattr(tables, f"IQ{bits}_VALUES"), getattr(tables, f"IQ{bits}_SHIFTS")[1]) for bits in range(2, 7)
    ]
    rows = [(name, f"+{shift}", " ".join(map(str, values.tolist()))) for name, values, shift in named]
    rows.append(("E2M1, doubled", "", " ".join(map(str, tables.E2M1_DOUBLED.tolist()))))
    rows.append(("iq2_kl, pairs", "", " ".join(f"({a}, {b})" for a, b in tables.IQ2_KL_PAIRS.tolist())))
    return _table(("table", "shifted copy", "values by code"), rows)


def layout_tables() -> str:
    """For every plain type with blocks: which numbers a block holds, how many of how many bits, and in which bytes they lie."""
    rows = []
    for kind in TYPES.values():
        if kind.base is not None or kind.block <= 1:
            continue
        layout = layout_of(kind.name)
        for i, (name, bits) in enumerate(layout.bit_arrays().items()):
            count, width = bits.shape[-2:]
            rows.append((kind.name if i == 0 else "", name, count, width, kind.block // count, _ranges(bits)))
        if layout.row_scale is not None:
            rows.append(("", "row scale", 1, layout.row_scale, "row", f"in the {kind.row_meta} bytes before the row"))
    return _table(("type", "numbers", "count", "bits", "weights each", "bytes of the block"), rows)


def _ranges(bits: np.ndarray) -> str:
    """The bytes in which bits lie, as ranges."""
    used = np.unique(bits // 8)
    runs = np.split(used, np.flatnonzero(np.diff(used) > 1) + 1)
    text = [f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return ", ".join(text) if len(text) <= 4 else f"{text[0]}, {text[1]} … {text[-1]}"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def functions() -> str:
    """Every function of the library: its signature and its docstring."""
    text = []
    for name in dict.fromkeys(name for verb in VERBS.values() for name in verb.functions):
        function = getattr(ggufmill, name)
        arguments = [str(p.replace(annotation=p.empty)) for p in inspect.signature(function).parameters.values()]
        text += [f"### {name}", "", "```text", *wrap(f"{name}({', '.join(arguments)})", 120, subsequent_indent="    "), ""]
        text += [inspect.getdoc(function) or "", "```", ""]
    for group in (Sampling, Settings):
        text += [f"### {group.__name__}", "", "```text", documented(inspect.getdoc(group) or "", group), "```", ""]
    return "\n".join(text)


PARTS = {"functions": functions, "types": types_table, "values": value_tables, "layouts": layout_tables}


def pages() -> Iterator[tuple[Path, str]]:
    """Each generated page, and what it should hold."""
    yield PAGES / "command-line.md", command_line()
    for path in sorted(PAGES.rglob("*.md")):
        text = path.read_text("utf-8")
        if MARKED.search(text):
            yield path, MARKED.sub(lambda found: found[1] + PARTS[found[2]]() + found[3], text)


def main(arguments: list[str]) -> int:
    stale = [(path, text) for path, text in pages() if not path.exists() or path.read_text("utf-8") != text]
    if "--check" in arguments:
        for path, _ in stale:
            print(f"{path} is not current: run python docs/generate.py", file=sys.stderr)
        return 1 if stale else 0
    for path, text in stale:
        path.write_text(text, "utf-8")
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
