"""The pages: generated parts are current, links lead somewhere, commands and Python examples are real."""

import importlib.util
import json
import re
import shlex
import shutil
from pathlib import Path

import click
import pytest

from ggufmill import VERBS, compute_imatrix, convert_model, quantize_model
from ggufmill.cli.program import group
from ggufmill.formats import TYPES

ROOT = Path(__file__).parents[2]
SKIPPED = {".venv", ".git", "build", "out", "node_modules", ".pytest_cache"}
PAGES = sorted(p for p in ROOT.rglob("*.md") if not SKIPPED & set(p.relative_to(ROOT).parts))
LINK = re.compile(r"(?<!`)\[[^\]\n]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_current():
    stale = [path.name for path, text in _generator().pages() if path.read_text("utf-8") != text]
    assert not stale, "run python docs/generate.py"


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 120


def _anchors(page):
    """The anchors of a page's headings, as GitHub and MyST make them."""
    text = FENCE.sub("", page.read_text("utf-8"))
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", title.lower().replace("`", "")).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in LINK.findall(FENCE.sub("", page.read_text("utf-8"))):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        where = (page.parent / path).resolve() if path else page
        assert where.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in set(_anchors(where)), f"{page}: {target}"


def test_every_type_described_is_in_the_table():
    page = (ROOT / "docs" / "formats" / "layouts.md").read_text("utf-8")
    described = page.partition("## Formats of ik_llama.cpp")[2].partition("## Not read here")[0]
    names = re.findall(r"^\* \*\*(\w+)\*\*", described, re.MULTILINE)
    assert len(names) > 15
    assert [name for name in names if name not in TYPES] == []
    assert not TYPES.by_id(36).is_known  # i2_s, as the page says


INDENTED = re.compile(r"^ {4}\S.*(?:\n {4}.*\S.*)*", re.MULTILINE)


def _commands(page):
    """(line, words after `ggufmill`) of each command that a page shows, in fences and in indented blocks."""
    text = page.read_text("utf-8")
    fences = [body for language, body in FENCE.findall(text) if language in ("sh", "")]
    for block in [*fences, *INDENTED.findall(FENCE.sub("", text))]:
        for line in block.replace("\\\n", " ").splitlines():
            shown = re.match(r"\s*(?:\w+\$ )?ggufmill (?!VERB)(.+)", line)
            if shown:
                yield line.strip(), shlex.split(shown[1], comments=True)


def _parsed(words):
    """(verb, parameter's name -> word or words) of a command; raises for a verb or a flag that there is not."""
    command, words = group, list(words)
    while isinstance(command, click.Group):
        context = click.Context(command)
        sub = command.get_command(context, words[0]) if words else None
        command, words = (sub, words[1:]) if sub else (command.commands["compute"], words)
    return command.name, command.make_parser(click.Context(command)).parse_args(words)[0]


COMMANDS = [(page, line, words) for page in PAGES for line, words in _commands(page) if not words[0].startswith("-")]


@pytest.mark.parametrize("words", [pytest.param(words, id=f"{page.stem}: {line[:60]}") for page, line, words in COMMANDS])
def test_commands_exist(words):
    assert words[0] in VERBS
    _parsed(words)


# Commands that do not end, need a connection or a device, need data that does not come with the program, or measure for long.
NOT_RUN = re.compile(
    r"ggufmill (serve|chat)\b|hf:|tcp:|--yes|--device cuda|adapter|--lora|--mmproj|--hellaswag|--winogrande|--multiple-choice"
    r"|--nextn|--mtp|--draft-max|--only-shards|-0000|/shared|ggufmill upload|--calibration"
)
NEEDS_TORCH = re.compile(r"curv|--sequential|ggufmill tune")
# What is added to some commands, so that little is computed.
LESS = {
    "make|run|tune|search .*--curvature|quantize .*--curvature": ["--dry-run"],
    "search": ["--types", "q2_K,q4_K"],
    "search .*-f": ["--chunks", "1", "--measurements", "1"],
    r"imatrix \S+ -f": ["--chunks", "3"],
    "perplexity|evaluate .*-f": ["--chunks", "2"],
    "generate": ["-n", "4"],
    "bench": ["-r", "1"],
    "sweep-bench": ["-c", "1024"],
}
WRITTEN = {"out", "plot", "kl_divergence_base"}  # parameters that name what a command writes; of `imatrix compute` these, too
COLLECTED = {"covariance", "curvature"}
SEPARATORS = re.compile("[=,:]")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """What a name ends in -> a file or folder of that kind, made of the demo. The first that fits."""
    out, demo = tmp_path_factory.mktemp("inputs"), ROOT / "recipes" / "demo"
    (out / "text").write_text((demo / "calibration.txt").read_text("utf-8")[:16000])
    (out / "questions").write_text('{"question": "1 + 1", "answer": "2"}\n')
    (out / "chats").write_text(json.dumps({"text": (out / "text").read_text()}) + "\n")
    (out / "recipe").write_text("ffn_down=q4_K\n")
    bf16, quant, quants = out / "bf16.gguf", out / "iq4_k.gguf", out / "quants"
    convert_model(demo, bf16)
    compute_imatrix(bf16, out / "text", out / "imatrix", covariance=out / "covariance", covariance_experts=True)
    quantize_model(bf16, quant, "IQ4_K", imatrix=out / "imatrix")
    quants.mkdir()
    shutil.copy(quant, quants)
    kinds = dict.fromkeys(("recipe.txt", "my.txt", "small.txt"), out / "recipe") | {
        "gsm8k.jsonl": out / "questions",
        "quants/": quants,
    }
    kinds |= {"bf16.gguf": bf16, "model.gguf": bf16, "qwen3.gguf": bf16, "q8_0.gguf": bf16, ".gguf": quant, "/": demo}
    kinds |= {".imatrix": out / "imatrix", ".dat": out / "imatrix", ".cov": out / "covariance"}
    return kinds | {".txt": out / "text", ".raw": out / "text", ".jsonl": out / "chats"}


def _prepare(verb, values, inputs):
    """Links to what a command reads, where it is not there yet. What it is to write goes: pages show two ways to one file."""
    written = WRITTEN | COLLECTED if verb == "compute" else WRITTEN
    for name, value in values.items():
        for word in (value,) if isinstance(value, str) else value if isinstance(value, list | tuple) else ():
            for part in SEPARATORS.split(word or ""):
                if name in written and Path(part).exists():
                    shutil.rmtree(part) if Path(part).is_dir() else Path(part).unlink()
                source = next((inputs[kind] for kind in inputs if part.endswith(kind)), None)
                if name not in written and source and not Path(part).exists() and not (ROOT / "recipes" / part).exists():
                    Path(part).symlink_to(source)


@pytest.fixture(scope="module")
def tried():
    """Dry runs that pages have in common: once is enough, since they leave nothing behind."""
    return set()


def _page_cases():
    for page in PAGES:
        lines = [line for shown_on, line, _ in COMMANDS if shown_on == page and not NOT_RUN.search(line)]
        if lines:
            marks = [pytest.mark.slow, *[pytest.mark.oracle] * any(NEEDS_TORCH.search(line) for line in lines)]
            yield pytest.param(page, marks=marks, id=str(page.relative_to(ROOT)))


@pytest.mark.parametrize("page", list(_page_cases()))
def test_commands_run(page, mill, inputs, tried, tmp_path, monkeypatch):
    """The commands of a page, in their order, in a folder where what they read is the demo, or made of it."""
    monkeypatch.chdir(tmp_path)
    for words in [words for shown_on, line, words in COMMANDS if shown_on == page and not NOT_RUN.search(line)]:
        _prepare(*_parsed(words), inputs)
        less = [word for pattern, more in LESS.items() if re.match(rf"({pattern})\b", shlex.join(words)) for word in more]
        shown = tuple(dict.fromkeys([*words, *less]))
        if "--dry-run" in shown and shown in tried:
            continue
        tried.add(shown)
        code, _, err = mill(*words, *less)
        assert code == 0, f"{shlex.join(words)}: {err}"
        if Path("model.curv").exists():
            inputs = inputs | {".curv": tmp_path / "model.curv"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the examples run, one after the other: the demo checkpoint and its texts lie there."""
    out = tmp_path_factory.mktemp("examples")
    (out / "demo").symlink_to(ROOT / "recipes" / "demo")
    return out


@pytest.mark.process
def test_python_examples_run(folder, monkeypatch):
    """The page's examples, in order, in one namespace."""
    monkeypatch.chdir(folder)
    page = (ROOT / "docs" / "python-api.md").read_text("utf-8")
    blocks = [body for language, body in FENCE.findall(page) if language == "python"]
    assert blocks
    namespace = {}
    for body in blocks:
        exec(compile(body, "python-api.md", "exec"), namespace)
