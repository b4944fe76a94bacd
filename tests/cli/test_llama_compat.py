"""Command lines as llama-quantize takes them: understood, or answered with what is to be written here."""

import pytest

from ggufmill.recipes import FOLDER

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
        (("o.gguf", "COPY"), "COPY is no type; where TYPE is left out, tensors that no rule takes keep theirs"),
        (("--repack", "o.gguf", "q8_0"), "there is no --repack: `ggufmill repack IN OUT`"),
        (("--repack-pattern", "attn", "o.gguf", "q8_0"), "`ggufmill repack IN OUT --pattern REGEX`"),
        (
            ("--tensor-type", "a=b", "o.gguf", "q8_0"),
            'there is no --tensor-type: rules are given by --custom-q "REGEX=TYPE,..."',
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
