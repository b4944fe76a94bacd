"""Command lines as llama-quantize takes them: understood, or answered with what is to be written here."""

import json

import click
import pytest

from ggufmill.recipes import FOLDER

from .test_help import COMMANDS

DEMO = FOLDER / "demo"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("o.gguf", "IQ4_K", "24"), "24 is one argument too many; a number of threads is given by -t 24"),
        (("o.gguf", "IQ4_K", "24", "x"), "got unexpected extra arguments (24 x)"),
        (("Q4_K_M", "8"), "'Q4_K_M' is a type; the name of the output comes before it"),
        (("iq4_k", "8"), "'iq4_k' is a type; the name of the output comes before it"),
        (("o.gguf", "64"), "there is no file type 64; give one by its name (threads are given by -t)"),
        (("o.gguf", "9" * 5000), "there is no file type 9"),
        (
            ("o.gguf", "COPY"),
            "COPY is no type; with rules and no TYPE, tensors that no rule takes keep theirs",
        ),
        (("--repack", "o.gguf", "q8_0"), "--repack is not an option here: `ggufmill repack IN OUT`"),
        (("--repack-pattern", "attn", "o.gguf", "q8_0"), "`ggufmill repack IN OUT --pattern REGEX`"),
        (
            ("--tensor-type", "a=b", "o.gguf", "q8_0"),
            '--tensor-type is not an option here: rules are given by --custom-q "REGEX=TYPE,..."',
        ),
        (("--tensor-type=a=b", "o.gguf", "q8_0"), "--custom-q"),
        (("--tensor-type-file", "r.txt", "o.gguf", "q8_0"), "--recipe FILE"),
        (("o.gguf", "q8_0", "--recipes", "r.txt"), "No such option '--recipes'"),
    ],
)
def test_llama_quantize_arguments_are_answered(mill, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = mill("quantize", DEMO, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_file_type_by_number(mill, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, named, _ = mill("quantize", DEMO, "o.gguf", "Q4_K_M", "--dry-run", "--json", "--no-timing")
    assert code == 0
    code, numbered, err = mill("quantize", DEMO, "o.gguf", "15", "--dry-run", "--json", "--no-timing")
    assert code == 0
    assert "file type 15 is Q4_K_M" in err
    assert numbered.partition('"disk"')[0] == named.partition('"disk"')[0]


def test_the_bundled_demo_is_found_in_any_folder(mill, tmp_path, monkeypatch):
    """The steps of docs/quickstart.md need no clone; a file or folder of the same name comes first."""
    monkeypatch.chdir(tmp_path)
    assert mill("convert", "demo", "o.gguf", "--dry-run")[0] == 0
    code, _, err = mill("imatrix", "demo", "-f", "demo/calibration.txt", "-o", "i.gguf", "--chunks", 1, "--dry-run")
    assert code == 0, err
    assert mill("convert", "demo/none", "o.gguf", "--dry-run")[0] == 2
    (tmp_path / "demo").mkdir()
    assert mill("convert", "demo", "o.gguf", "--dry-run")[0] == 1


NAMED = [
    (DEMO, "-o", "o.gguf", "q8_0"),
    (DEMO, "--output=o.gguf", "q8_0"),
    ("--outfile", "o.gguf", DEMO, "q8_0"),
    ("-m", DEMO, "o.gguf", "q8_0"),
    (f"--model={DEMO}", "o.gguf", "q8_0"),
    (DEMO, "o.gguf", "-q", "q8_0"),
    ("--type", "q8_0", DEMO, "o.gguf"),
    (DEMO, "o.gguf", "--outtype", "q8_0"),
    ("--format=q8_0", "-m", DEMO, "-o", "o.gguf"),
    ("-q", "q8_0", "-o", "o.gguf", "--", DEMO),
    ("--dry_run", DEMO, "o.gguf", "q8_0"),
]


@pytest.mark.parametrize("words", NAMED)
def test_arguments_of_quantize_may_be_options(mill, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = mill("quantize", "--dry-run", "--no-timing", "--json", *map(str, words))
    assert code == 0, err
    assert [file["path"] for file in json.loads(out)["files"]] == ["o.gguf"]
    assert set(json.loads(out)["types"]) == {"q8_0", "f32"}


WRITING = {  # verbs that write a file or a folder, and a command line without its name
    "make": ("x.gguf",),
    "convert": (DEMO,),
    "export": ("x.gguf",),
    "imatrix": ("x.gguf", "-f", DEMO / "heldout.txt"),
    "imatrix compute": ("x.gguf", "-f", DEMO / "heldout.txt"),
    "imatrix convert": ("x.gguf",),
    "imatrix merge": ("x.gguf",),
    "quantize": (DEMO, "q8_0"),
    "search": (DEMO, "--target-bpw", "5"),
    "repack": ("x.gguf",),
    "tune": ("x.gguf", "x.gguf"),
    "evaluate": ("x.gguf", "--against", DEMO, "-f", DEMO / "heldout.txt"),
    "bench": ("x.gguf",),
    "sweep-bench": ("x.gguf",),
    "metadata": ("x.gguf", "--set", "general.author=me"),
    "convert-endian": ("x.gguf",),
    "split": ("x.gguf",),
    "merge": ("x.gguf",),
    "hash": ("x.gguf",),
    "run": ("x.toml",),
}


@pytest.mark.parametrize("verb", WRITING)
@pytest.mark.parametrize("option", ["-o", "--out", "--output", "--outfile"])
def test_verbs_that_write_take_the_name_by_option(mill, tmp_path, monkeypatch, verb, option):
    """An empty file is the source: the command line is understood, and the file is what is wrong."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.gguf").touch()
    code, _, err = mill(*verb.split(), *map(str, WRITING[verb]), option, "none/o.json")
    assert code in (1, 2)
    assert "No such option" not in err
    assert "unexpected extra argument" not in err
    assert "none" in err or "x.gguf" in err or "x.toml" in err


def test_o_names_what_a_verb_writes_wherever_there_is_one():
    """Every command with an output is in the table above, and -o of a command is nothing else."""
    outputs = {"out", "output", "results"}
    found = set()
    for words, command in COMMANDS.items():
        names = {parameter.name for parameter in command.params}
        found |= {words} if names & outputs else set()
        short = [parameter for parameter in command.params if "-o" in parameter.opts]
        assert [parameter.name for parameter in short if parameter.name not in outputs] == [], words
    assert found == set(WRITING) - {"imatrix"}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("quantize", DEMO, "-q", "q8_0"), 2, "Missing argument 'OUT'"),
        (("quantize", "--bits", "4", DEMO, "o.gguf"), 2, "the TYPE says it: Q4_K_M"),
        (
            ("quantize", DEMO, "o.gguf", "int4"),
            2,
            "near it are Q4_K_M, IQ4_XS, IQ4_K; `ggufmill quantize --help-all` lists all",
        ),
        (("quantize", DEMO, "o.gguf", "AWQ"), 2, "near it are Q4_K_M"),
        (("convert", DEMO, "o.gguf", "--outtype", "q4_k_m"), 2, "`ggufmill quantize MODEL OUT q4_k_m`, in one pass"),
        (("convert", DEMO, "o.gguf", "--dtype", "f16", "--dry-run"), 0, ""),
        (("convert", "hf:a/b", "--revision", "main", "o.gguf"), 2, "hf:OWNER/NAME@REVISION"),
        (("generate", "none.gguf", "-p", "a", "--max-tokens", "4", "--temperature", "0"), 2, "'none.gguf' does not exist"),
        (("generate", "none.gguf", "-p", "a", "--max_new_tokens", "4", "--top_p", "1"), 2, "'none.gguf' does not exist"),
        (("generate", "none.gguf", "a text"), 2, "'none.gguf' does not exist"),
        (("embed", "none.gguf", "a text", "another"), 2, "'none.gguf' does not exist"),
        (("perplexity", DEMO, "--dataset", "wikitext"), 2, "-f FILE names a text"),
        (("imatrix", DEMO, "--dataset", "wikitext"), 2, "-f FILE names a text"),
        (("quantize", DEMO, "o.gguf", "q8_0", "--dataset", "c4"), 2, "--calibration FILE names a text"),
        (("ppl", DEMO), 2, "did you mean perplexity?"),
        (("ls",), 2, "did you mean recipes list?"),
        (("list",), 2, "did you mean recipes list?"),
        (("push",), 2, "did you mean upload?"),
        (("help", "hash"), 0, ""),
        (("version",), 0, ""),
        (("-V",), 0, ""),
        (("plan", "-m", DEMO, "-fmoe", "-ngl", "99", "-fa", "--ram", "64GiB"), 0, ""),
        (("plan", DEMO, "-fa", "0"), 0, ""),
        (("convert", DEMO, "--outfile", "o.gguf", "--outtype", "F16", "--dry-run"), 0, ""),
        (("convert", "-o", "o.gguf", DEMO, "--dry-run"), 0, ""),
        (("convert", f"--model={DEMO}", "--outfile=o.gguf", "--dry-run"), 0, ""),
        (("convert", DEMO, "--outfile"), 2, "No such option '--outfile'"),
        (("convert", DEMO, "o.gguf", "-v", "--dry-run"), 0, "note: -v has no effect here"),
        (("plan", DEMO, "-tb", "4", "--no-mmap", "-cb"), 0, "note: -tb has no effect here: there is one number of threads"),
        (("plan", DEMO, "-sm", "layer"), 2, "-sm is not an option here: layers are split over devices"),
        (("bench", "-m", "none.gguf"), 2, "'none.gguf' does not exist"),
        (("generate", "none.gguf", "-fmoe", "-p", "a"), 2, "'none.gguf' does not exist"),
        (("perplexity", "none.gguf", "--fused-moe", "-fmoe"), 2, "'none.gguf' does not exist"),
        (("generate", "-m", "none.gguf", "-cnv"), 2, "ggufmill chat MODEL talks"),
        (("serve", "-hf", "a/b"), 2, "ggufmill convert hf:OWNER/NAME OUT.gguf"),
        (("serve", "none.gguf", "--chat-template", "x", "-a", "y"), 2, "'none.gguf' does not exist"),
        (("generate", "none.gguf", "-p", "-cnv"), 2, "'none.gguf' does not exist"),
        (("plan", DEMO, "--ram", "64"), 2, "64 is a number of bytes, for a size in other units write 64GiB or 64MiB"),
        (("plan", DEMO, "--vram", "24,24"), 2, "24 is a number of bytes, for a size in other units write 24GiB or 24MiB"),
        (
            ("plan", "Qwen/Qwen3-8B"),
            2,
            "for the repository of that name, write hf:Qwen/Qwen3-8B",
        ),
        (("generate", "Qwen/Qwen3-8B", "-p", "a"), 2, "`ggufmill convert hf:Qwen/Qwen3-8B OUT.gguf`"),
        (("generate", "-m", "none.gguf", "-p", "a"), 2, "'none.gguf' does not exist"),
        (("search", DEMO, "o.gguf"), 2, "o.gguf is named like a model; what is written is a recipe, such as o.txt"),
        (("generate", "--promt", "a"), 2, "Did you mean '--prompt'?"),
        (("merge", "a.gguf", "b.gguf", "out.gguf"), 2, "does not exist"),
    ],
)
def test_command_lines_of_other_programs_are_taken_or_answered(mill, tmp_path, monkeypatch, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    got, _, err = mill(*map(str, arguments))
    assert got == code, err
    assert message in err
    assert not list(tmp_path.iterdir())


def test_options_that_mean_something_else_are_not_offered(mill):
    for verb, option in (("plan", "--only"), ("generate", "--only"), ("perplexity", "--sed")):
        code, _, err = mill(verb, option)
        assert code == 2
        assert "Did you mean" not in err


def test_a_text_of_stdin_is_read_whole(tmp_path):
    from click.testing import CliRunner

    from ggufmill.cli.options.types import TEXT

    @click.command()
    @click.option("-f", type=TEXT)
    def show(f):
        click.echo(f.read_bytes() + f.read_bytes(), nl=False)

    assert CliRunner().invoke(show, ["-f", "-"], input="ab\n").output == "ab\nab\n"


def test_merge_takes_all_shards(mill, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert mill("convert", DEMO, "part.gguf", "--split-max-tensors", "40")[0] == 0
    shards = sorted(tmp_path.glob("part-*.gguf"))
    assert len(shards) > 1
    code, _, err = mill("merge", *shards, tmp_path / "out.gguf")
    assert code == 0, err
    code, _, err = mill("merge", shards[0], tmp_path / "out.gguf", tmp_path / "two.gguf")
    assert code == 2
    assert "out.gguf is no shard of the model" in err


@pytest.mark.parametrize("verb", ["convert", "quantize", "imatrix", "perplexity"])
def test_the_bundled_models_old_path_is_answered_with_its_name(mill, tmp_path, monkeypatch, verb):
    monkeypatch.chdir(tmp_path)
    code, _, err = mill(
        verb, "recipes/demo", "out.gguf", *(["-f", FOLDER / "demo/heldout.txt"] if verb == "perplexity" else [])
    )
    assert (code, "the bundled model is called demo" in err) == (2, True)


@pytest.mark.parametrize("verb", ["run", "evaluate", "make", "search", "upload"])
def test_verbs_that_always_resume_take_the_word(mill, tmp_path, verb):
    code, _, err = mill(verb, tmp_path / "nothing", "--resume")
    assert (code != 0, "the same command always resumes" in err, "No such option" in err) == (True, True, False)
