"""The program as a user calls it: in a process of its own for exit codes and output, else through `main`."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from peak_memory import PEAK_BYTES

from ggufmill import VERBS
from ggufmill.formats import open_gguf
from ggufmill.imatrix import Imatrix
from ggufmill.recipes import FOLDER

DEMO = FOLDER / "demo"


@pytest.fixture
def checkpoint(tiny_llama, write_checkpoint, tmp_path):
    config, tensors = tiny_llama(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2)
    return write_checkpoint(tmp_path / "model", config, tensors, 2)


def test_every_verb_has_help_with_an_example(mill):
    for verb in VERBS:
        code, out, _ = mill(verb, "--help")
        assert code == 0
        assert f"ggufmill {verb}" in out.split("Options:")[0], verb
        assert "Example" in out, verb


def test_convert_then_quantise_then_repack_and_back(mill, checkpoint, tmp_path):
    bf16, small, packed, again = (tmp_path / f"{name}.gguf" for name in ("bf16", "small", "packed", "again"))
    assert mill("convert", checkpoint, bf16)[0] == 0
    assert open_gguf(bf16).tensors["blk.0.ffn_up.weight"].type.name == "bf16"
    assert mill("quantize", bf16, small, "iq4_k", "--custom-q", "ffn_down=Q6_K,attn_k=q8_0")[0] == 0
    types = {n: t.type.name for n, t in open_gguf(small).tensors.items()}
    assert types["blk.1.ffn_down.weight"] == "q6_K"
    assert types["blk.1.attn_k.weight"] == "q8_0"
    assert types["blk.1.attn_norm.weight"] == "f32"
    assert types["output.weight"] == "q6_K"  # the mix of IQ4_K
    code, out, _ = mill("repack", small, packed, "--json")
    assert code == 0
    assert json.loads(out)["types"]["iq4_k_r4"]["tensors"] > 0
    assert mill("repack", packed, again, "--undo")[0] == 0
    assert again.read_bytes() == small.read_bytes()


def test_a_checkpoint_quantises_in_one_pass_to_the_same_bytes_as_over_f32(mill, checkpoint, tmp_path):
    assert mill("convert", checkpoint, tmp_path / "f32.gguf", "--outtype", "f32")[0] == 0
    assert mill("quantize", tmp_path / "f32.gguf", tmp_path / "two.gguf", "iq5_k_r4")[0] == 0
    assert mill("quantize", checkpoint, tmp_path / "one.gguf", "iq5_k_r4")[0] == 0
    one, two = open_gguf(tmp_path / "one.gguf"), open_gguf(tmp_path / "two.gguf")
    assert one.tensors.keys() == two.tensors.keys()
    assert all(np.array_equal(one.tensors[n].data, two.tensors[n].data) for n in one.tensors)


def test_dry_run_is_exact_and_writes_nothing(mill, checkpoint, tmp_path):
    out = tmp_path / "o.gguf"
    arguments = ("quantize", checkpoint, out, "q4_K", "--split-max-size", "300K")
    code, text, _ = mill(*arguments, "--dry-run", "--json")
    plan = json.loads(text)
    assert code == 0
    assert not list(tmp_path.glob("o*"))
    assert mill(*arguments)[0] == 0
    assert len(plan["files"]) > 1
    for file in plan["files"]:
        assert os.path.getsize(file["path"]) == file["nbytes"]
    assert {t["name"] for t in plan["tensors"]} == set(open_gguf(plan["files"][0]["path"]).tensors)
    keys = {"name", "shape", "source_type", "type", "rule", "offset", "nbytes"}
    assert keys <= plan["tensors"][0].keys()
    assert {"total_bytes", "file_bytes", "bits_per_weight"} <= plan.keys()


REFUSALS = [
    (["quantize", "MODEL", "out.gguf", "q4_kk"], 2, "there is no file type 'q4_kk'; near it are"),
    (["quantize", "MODEL", "out.gguf", "q8_0", "--frobnicate"], 2, "No such option"),
    (["quantize", "nothing", "out.gguf"], 2, "does not exist (a model of the Hub is hf:OWNER/NAME)"),
    (
        ["quantize", "MODEL", "out.gguf", "--recipe", "none.txt"],
        1,
        "none.txt: No such file or directory; `ggufmill",
    ),
    (["quantise", "MODEL", "out.gguf"], 2, "there is no verb 'quantise'; did you mean quantize?"),
    (["recipes", "shwo"], 2, "Did you mean 'show'?"),
    (["convert", "junk", "out.gguf"], 2, "junk is a file; give a folder, or hf:OWNER/NAME"),
    (["convert", ".", "out.gguf"], 1, ". is no checkpoint: it has no config.json"),
    (["repack", "junk", "out.gguf", "--pattern", "("], 2, "'(' is not a regular expression"),
    (["compare", "junk", "junk", "--tensors", "("], 2, "'(' is not a regular expression"),
    (["search", "MODEL", "r.txt", "--gpu", "("], 2, "'(' is not a regular expression"),
    (["plan", "MODEL", "--ram", "5Q"], 2, "'5Q' is not a size"),
    (["plan", "MODEL", "--vram", "5G,5Q"], 2, "'5Q' is not a size; write for example 50G or 512MiB"),
    (["split", "junk", "out", "--split-max-size", "9" * 400 + "G"], 2, "is not a size"),
    (["generate", "MODEL", "-p", "x", "--top-p", "7"], 2, "7.0 is not in the range"),
    (["search", "MODEL", "r.txt", "--target-bpw", "nan"], 1, "a target of nan cannot be reached"),
    (["search", "MODEL", "r.txt", "--target-bpw", "5", "-f", "binary"], 1, "binary is not a text file: it has a zero byte"),
    (["quantize", "MODEL", "out.gguf", "--custom-q", "ffn=iq9"], 1, "--custom-q, line 1, column 5: there is no tensor type"),
    (["quantize", "MODEL", "out.gguf", "q8_0", "--custom-q", "nope=q8_0", "--strict"], 1, "--strict: line 1: nope=q8_0"),
    (["quantize", "MODEL", "out.gguf", "q8_0", "--imatrix", "junk"], 1, "junk: not an imatrix"),
    (["quantize", "MODEL", "out.gguf", "q8_0", "--override-kv", "a=b"], 2, "is not KEY=TYPE:VALUE"),
    (["quantize", "MODEL", "out.gguf", "q8_0", "--split-max-size", "5Q"], 2, "'5Q' is not a size"),
    (["quantize", "MODEL", "taken.gguf", "q8_0"], 1, "taken.gguf exists; use --force"),
    (["quantize", "junk", "out.gguf", "q8_0"], 1, "junk is neither a checkpoint folder nor a .gguf file"),
    (["inspect", "taken.gguf"], 1, "not a GGUF file"),
    (["imatrix", "show", "junk"], 1, "junk: not an imatrix"),
    (["perplexity", "MODEL", "-f", "junk"], 1, "one window needs 512"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), REFUSALS, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_refusals_are_one_line_and_leave_nothing(mill, checkpoint, tmp_path, monkeypatch, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.gguf").write_bytes(b"something of the user's that must stay")
    (tmp_path / "binary").write_bytes(b"text and \0")
    (tmp_path / "junk").write_bytes(b"this is junk of some length, and neither text nor model")
    before = sorted(p.name for p in tmp_path.iterdir())
    got, out, err = mill(*["model" if a == "MODEL" else a for a in arguments])
    assert got == code
    assert message in err
    assert out == ""
    said = [line for line in err.splitlines() if line.strip() and "chunk/s" not in line]
    lines = [line for line in said if not line.startswith(("note:", "warning:", "compiling"))]
    assert len(lines) == 1
    assert "Traceback" not in err
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert (tmp_path / "taken.gguf").read_bytes().startswith(b"something")


def test_the_input_is_never_the_output(mill, checkpoint, tmp_path):
    mill("convert", checkpoint, tmp_path / "a.gguf")
    before = (tmp_path / "a.gguf").read_bytes()
    code, _, err = mill("quantize", tmp_path / "a.gguf", tmp_path / "a.gguf", "q8_0", "--force")
    assert code == 1
    assert "is an input of this job" in err
    assert (tmp_path / "a.gguf").read_bytes() == before


def test_an_internal_error_is_one_line(mill, checkpoint, monkeypatch, tmp_path):
    def broken(*_, **__):
        raise KeyError("oops")

    monkeypatch.setattr("ggufmill.pipeline.planning.open_source", broken)
    code, _, err = mill("convert", checkpoint, tmp_path / "a.gguf")
    assert code == 1
    assert re.fullmatch(r"ggufmill: internal error: KeyError: 'oops' \(.*--debug.*\)\n", err)


@pytest.mark.parametrize("is_explained", [False, True])
def test_a_library_that_cannot_be_loaded_is_named(mill, checkpoint, monkeypatch, tmp_path, is_explained):
    """As when there is no memory left to map it. numpy makes a long text of such an error."""

    def broken(*_, **__):
        unloaded = ImportError("/lib/mmap.so: failed to map segment from shared object", path="/lib/mmap.so")
        if is_explained:
            raise ImportError("IMPORTANT: PLEASE READ THIS") from unloaded
        raise unloaded

    monkeypatch.setattr("ggufmill.pipeline.planning.open_source", broken)
    code, _, err = mill("convert", checkpoint, tmp_path / "a.gguf")
    assert code == 1
    assert re.match(r"ggufmill: a library cannot be loaded.*/lib/mmap.so: failed to map", err)


def test_a_program_that_cannot_be_loaded_is_one_line(monkeypatch, capsys):
    from ggufmill.cli import main

    monkeypatch.setitem(sys.modules, "ggufmill.cli.program", None)  # importing it is an ImportError
    with pytest.raises(SystemExit) as ended:
        main(["inspect"])
    assert ended.value.code == 1
    assert re.fullmatch(r"ggufmill: the program cannot be loaded: .*\n", capsys.readouterr().err)


def test_inspect(mill, checkpoint, tmp_path):
    mill("convert", checkpoint, tmp_path / "a.gguf", "--outtype", "q8_0")
    code, text, _ = mill("inspect", tmp_path / "a.gguf", "--json", "--check", "--checksums")
    result = json.loads(text)
    assert code == 0
    assert result["metadata"]["general.architecture"] == "llama"
    assert all(t["nonfinite"] == 0 and len(t["xxh3"]) == 16 for t in result["tensors"])
    code, text, _ = mill("inspect", tmp_path / "a.gguf")
    assert "blk.0.ffn_up.weight" in text
    assert "bits per weight" in text


def test_inspect_finds_nan(mill, tiny_llama, write_checkpoint, tmp_path):
    config, tensors = tiny_llama(intermediate_size=64)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = np.nan
    folder = write_checkpoint(tmp_path / "model", config, tensors)
    done = mill("convert", folder, tmp_path / "a.gguf", "--outtype", "f32", "--allow-nonfinite", "--json")
    tensor = next(t for t in json.loads(done[1])["tensors"] if t["name"] == "blk.0.ffn_up.weight")
    with (tmp_path / "a.gguf").open("r+b") as file:
        file.seek(tensor["offset"])
        file.write(np.float32("nan").tobytes())
    code, _, err = mill("inspect", tmp_path / "a.gguf", "--check")
    assert code == 1
    assert "blk.0.ffn_up.weight" in err
    code, _, err = mill("quantize", folder, tmp_path / "b.gguf", "q8_0")
    assert code == 1
    assert "blk.0.ffn_up.weight: the weight at row 3, column 5 is nan" in err
    assert "tensors are kept; --resume continues" in err
    code, _, err = mill("quantize", folder, tmp_path / "c.gguf", "q8_0", "--allow-nonfinite")
    assert code == 0
    assert "blk.0.ffn_up.weight: 1 weights were not finite and are written as 0" in err
    assert mill("inspect", tmp_path / "c.gguf", "--check")[0] == 0


def test_allow_nonfinite_writes_zeros(mill, tiny_llama, write_checkpoint, tmp_path):
    config, tensors = tiny_llama()
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = np.inf
    folder = write_checkpoint(tmp_path / "model", config, tensors)
    code, _, err = mill("convert", folder, tmp_path / "a.gguf")
    assert code == 1
    assert "--allow-nonfinite writes 0 instead" in err
    code, _, err = mill("convert", folder, tmp_path / "b.gguf", "--allow-nonfinite")
    assert code == 0
    assert "blk.0.ffn_up.weight: 1 weights were not finite and are written as 0" in err
    assert mill("inspect", tmp_path / "b.gguf", "--check")[0] == 0


@pytest.mark.parametrize(
    ("verb", "type_name"), [("convert", "bf16"), ("convert", "q8_0"), ("quantize", "iq4_nl"), ("quantize", "mxfp4")]
)
@pytest.mark.parametrize(("weight", "size"), [(3.4e38, "large"), (1e-42, "small")])
def test_rows_that_no_scale_holds_end_a_job(mill, tiny_llama, write_checkpoint, tmp_path, verb, type_name, weight, size):
    config, tensors = tiny_llama(intermediate_size=64)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = np.full_like(tensors[name], weight, np.float32)
    folder = write_checkpoint(tmp_path / "model", config, tensors)
    arguments = ("--outtype", type_name) if verb == "convert" else (type_name,)
    code, _, err = mill(verb, folder, tmp_path / "a.gguf", *arguments)
    assert code == 1
    assert f"blk.0.ffn_up.weight: row 0 (largest weight {weight:.3g}) is too {size} for {type_name}" in err
    assert not (tmp_path / "a.gguf").exists()


def test_a_toml_recipe_sets_type_split_and_layout(mill, checkpoint, tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text("[quantize]\ntype = 'q8_0'\nsplit_max_size = 300000\nrules = 'ffn_down=q6_K'\n")
    arguments = ("quantize", checkpoint, tmp_path / "o.gguf", "--recipe", recipe, "--dry-run", "--json")
    plan = json.loads(mill(*arguments)[1])
    types = {t["name"]: t["type"] for t in plan["tensors"]}
    assert types["blk.0.ffn_up.weight"] == "q8_0"
    assert types["blk.0.ffn_down.weight"] == "q6_K"
    assert len(plan["files"]) > 1
    assert plan["warnings"] == []
    plan = json.loads(mill(*arguments[:3], "q4_K", *arguments[3:], "--split-max-size", "1G")[1])
    assert {t["name"]: t["type"] for t in plan["tensors"]}["blk.0.ffn_up.weight"] == "q4_K"
    assert len(plan["files"]) == 1

    recipe.write_text("[convert]\nmla_layout = 'mainline'\n[quantize]\ntype = 'q8_0'\n")
    arguments = ("quantize", DEMO, tmp_path / "o.gguf", "--recipe", recipe, "--dry-run", "--json")
    by_recipe, by_flag, as_is = (
        {t["name"]: t["shape"] for t in json.loads(mill(*arguments, *more)[1])["tensors"]}
        for more in ((), ("--mla-layout", "ik"), ("--mla-layout", "mainline"))
    )
    assert by_recipe == as_is
    assert by_recipe != by_flag


def test_what_a_job_reads_is_never_its_output(mill, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules.txt").write_text("ffn=q8_0\n")
    imatrix = Imatrix({"blk.0.ffn_up.weight": (np.ones((1, 256), np.float32), np.ones(1, np.int64))}, ["t"], 1)
    imatrix.save(tmp_path / "i.imatrix")
    before = [(tmp_path / name).read_bytes() for name in ("rules.txt", "i.imatrix")]
    options = ("--recipe", "rules.txt", "--imatrix", "i.imatrix", "--force")
    for name in ("rules.txt", "i.imatrix"):
        code, _, err = mill("quantize", checkpoint, name, "q8_0", *options)
        assert code == 1
        assert f"{name} is an input of this job" in err
    assert [(tmp_path / name).read_bytes() for name in ("rules.txt", "i.imatrix")] == before


def test_imatrix_never_writes_over_what_it_reads(mill, checkpoint, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some words " * 400)
    weights = checkpoint / "model-00001-of-00002.safetensors"
    before = text.read_bytes(), weights.read_bytes()
    for out in (text, weights):
        code, _, err = mill("imatrix", checkpoint, "-f", text, "-o", out, "--force")
        assert code == 1
        assert f"{out} is an input of this job" in err
    assert (text.read_bytes(), weights.read_bytes()) == before


def test_help_of_quantize_lists_the_types(mill):
    _, out, _ = mill("quantize", "--help-all")
    assert {"Q4_K_M", "IQ4_K_R4"} <= set(out.partition("File types")[2].split())
    assert {"q6_K", "iq4_k_r4", "bf16"} <= set(out.partition("Tensor types")[2].split())


def test_recipes_list_and_show(mill):
    code, out, _ = mill("recipes", "list")
    assert code == 0
    assert "deepseek-v3-iq4_k_r4.txt" in out
    assert mill("recipes", "show", "deepseek-v3-iq4_k_r4")[1].startswith("# DeepSeek-V3-0324 IQ4_K_R4")
    assert mill("recipes", "show", "nothing")[0] == 2


PEAK = f"""
import sys
{PEAK_BYTES}
from ggufmill.cli import main
try:
    main(["convert", sys.argv[1], sys.argv[2], "--outtype", "bf16"])
finally:
    print("peak", peak_bytes())
"""


@pytest.mark.process
def test_peak_memory_does_not_grow_with_the_model(sparse_llama, tmp_path):
    """Ten times the model, the same memory: the larger is also seven times what may be taken more for it."""

    def peak(layers):
        folder = sparse_llama(tmp_path / f"model{layers}", layers)
        out = tmp_path / "out.gguf"
        done = subprocess.run([sys.executable, "-c", PEAK, folder, out], capture_output=True, text=True, check=False)
        size = out.stat().st_size
        out.unlink()
        return int(re.search(r"peak (\d+)", done.stdout)[1]), size

    small, small_size = peak(2)
    large, large_size = peak(20)
    assert large_size > 8 * small_size
    assert large_size > 320e6
    assert large - small < 48e6
