"""Files for one program: its types, fallbacks and layout, in planning and on the command line."""

import json

import numpy as np
import pytest

from ggufmill.formats import TYPES, PlanError, open_gguf
from ggufmill.formats.loader_facts import LoaderTensor
from ggufmill.formats.loaders import LOADERS, PROGRAMS, loader_problems
from ggufmill.quantize.recipes.loader_types import LoaderTypes
from ggufmill.recipes import FOLDER

DEMO = FOLDER / "demo"


def plan(mill, *arguments):
    code, text, err = mill("quantize", *arguments, "--dry-run", "--no-timing", "--json")
    assert code == 0, err
    return json.loads(text)


@pytest.fixture
def narrow(tiny_llama, write_checkpoint, tmp_path):
    """Rows of 96 and 64 weights, which no superblock fits."""
    return write_checkpoint(tmp_path / "m", *tiny_llama(hidden_size=64, intermediate_size=96))


def test_fallbacks_of_llama_cpp(mill, narrow, tmp_path):
    """ik_llama.cpp's q6_0 for q5_K is none of llama.cpp's types: it takes q5_1 (tensor_type_fallback in llama-quant.cpp)."""
    for name, ours, theirs in (("Q5_K_S", "q6_0", "q5_1"), ("Q2_K", "iq4_nl", "q4_0"), ("Q4_K_S", "q5_0", "q5_0")):
        any_types = {t["type"] for t in plan(mill, narrow, tmp_path / "a.gguf", name)["tensors"]}
        for program in ("llama.cpp", "ollama"):
            types = {t["type"] for t in plan(mill, narrow, tmp_path / "a.gguf", name, "--for", program)["tensors"]}
            assert theirs in types
            assert all(LOADERS[program].reads(TYPES[one].id) for one in types)
        assert ours in any_types
        assert plan(mill, narrow, tmp_path / "a.gguf", name, "--for", "ik_llama.cpp")["types"].keys() == any_types


@pytest.mark.parametrize("name", ["IQ3_M", "IQ4_XS", "IQ2_M", "Q4_K_M", "IQ1_S", "Q3_K_L", "IQ3_XS"])
def test_stock_mixes_with_types_of_llama_cpp_only(mill, tmp_path, name):
    made = plan(mill, DEMO, tmp_path / "a.gguf", name, "--for", "llama.cpp", "--ignore-imatrix-rules",
                *(("--imatrix", _imatrix(tmp_path)) if name.startswith(("IQ1", "IQ2")) else ()))  # fmt: skip
    assert all(TYPES[t["type"]].id <= 42 for t in made["tensors"])
    assert any("attn_k_b" in t["name"] for t in made["tensors"])


def _imatrix(tmp_path):
    from ggufmill.convert import open_source
    from ggufmill.imatrix.entries import Imatrix

    source = open_source(DEMO, mla_layout="mainline")
    entries = {}
    for tensor in source.tensors.values():
        if len(tensor.shape) > 1:
            matrices = int(np.prod(tensor.shape[2:], dtype=int))
            entries[tensor.name] = (np.ones((matrices, tensor.shape[0]), np.float32), np.ones(matrices, np.int64))
    Imatrix(entries, ["x"], 1, 512).save(tmp_path / "i.imatrix")
    return tmp_path / "i.imatrix"


def test_what_the_program_does_not_know_is_an_error(mill, narrow, tmp_path):
    out = tmp_path / "a.gguf"
    for arguments, said in (
        (("--custom-q", "attn_q=iq4_nl_r4"), "blk.0.attn_q.weight is to become iq4_nl_r4 (attn_q=iq4_nl_r4), which llama.cpp "
         "does not know; it knows iq4_nl"),
        (("IQ4_K",), "is to become iq4_k (IQ4_K), which llama.cpp does not know; of like size it knows iq4_nl, q4_K, iq4_xs"),
        (("q6_0",), "(Q6_0), which llama.cpp does not know; of like size it knows q6_K"),
        (("q8_0", "--output-tensor-type", "q6_0"), "output.weight is to become q6_0 (--output-tensor-type)"),
        (("--target-bpw", "6", "--types", "q8_0,iq4_k"), "llama.cpp does not know iq4_k; of like size it knows iq4_nl, "),
    ):  # fmt: skip
        code, _, err = mill("quantize", narrow, out, *arguments, "--for", "llama.cpp")
        assert code == 1
        assert said in err
        assert err.count("\n") == 1
    code, _, err = mill("quantize", narrow, out, "q8_0", "--split-max-tensors", 9, "--for", "ollama")
    assert code == 1
    assert "ollama would not load" in err
    assert "it does not take models in several files" in err
    code, _, err = mill("quantize", narrow, out, "tq2_0", "--pure", "--for", "ik_llama.cpp")
    assert "which ik_llama.cpp does not know" in err
    assert mill("quantize", narrow, out, "q8_0", "--for", "vllm")[0] == 2
    assert not out.exists()


@pytest.mark.parametrize("program", ["llama.cpp", "ik_llama.cpp", "ollama"])
def test_other_types_of_like_size_are_named(program):
    """Of every type that the program does not know: the plain twin alone, or types that it knows within a bit and a half."""
    loader = LoaderTypes(program)
    for kind in map(TYPES.__getitem__, TYPES):
        if kind.codec is None or loader.reads(kind):
            continue
        said, plain = loader.alternatives(kind), TYPES.plain(kind)
        if plain is not kind and loader.reads(plain):
            assert said == f"it knows {plain.name}"
            continue
        names = said.removeprefix("of like size it knows ").split(", ")
        assert len(set(names)) == 3
        assert all(loader.reads(TYPES[name]) for name in names)
        bits = [8 * TYPES[name].block_bytes / TYPES[name].block for name in names]
        assert abs(bits[0] - 8 * kind.block_bytes / kind.block) <= 1.5, (kind.name, said)


def test_layouts(mill, tmp_path):
    keys = {}
    for program in ("llama.cpp", "ik_llama.cpp", "ollama"):
        out = tmp_path / f"{program}.gguf"
        assert mill("convert", DEMO, out, "--for", program)[0] == 0
        keys[program] = open_gguf(out).metadata.get("deepseek2.attention.key_length_mla")
        assert mill("inspect", out, "--for", program)[0] == 0
    assert keys["ik_llama.cpp"] is None
    assert keys["llama.cpp"] == keys["ollama"] is not None
    code, _, err = mill("convert", DEMO, tmp_path / "x.gguf", "--for", "llama.cpp", "--mla-layout", "ik")
    assert code == 1
    assert "llama.cpp would not load" in err
    assert "convert --mla-layout mainline" in err
    code, _, err = mill("quantize", tmp_path / "ik_llama.cpp.gguf", tmp_path / "x.gguf", "q8_0", "--for", "llama.cpp")
    assert code == 1
    assert "its layout of latent attention is another" in err
    code, _, err = mill("repack", tmp_path / "llama.cpp.gguf", tmp_path / "x.gguf", "--pattern", "attn", "--for", "llama.cpp")
    assert code == 1
    assert "it does not know the tensor types" in err


def test_search_and_plan(mill, narrow, tmp_path):
    arguments = ("search", narrow, tmp_path / "r.txt", "--target-bpw", "6.5", "--rows", 8, "--for", "llama.cpp")
    code, text, err = mill(*arguments)
    assert code == 0, err
    types = {line.split("=")[1] for line in (tmp_path / "r.txt").read_text().splitlines() if line[:1] not in ("#", "")}
    assert types
    assert all(TYPES[name].id <= 42 for name in types)
    code, text, err = mill("plan", narrow, "--ram", "1G", "-c", 64, "--for", "llama.cpp", "--json")
    assert code == 0, err
    tried = {candidate["recipe"] for candidate in json.loads(text)["candidates"]}
    assert "Q4_K_M" in tried
    assert "IQ4_K" not in tried


def test_run(mill, narrow, tmp_path):
    path = tmp_path / "r.toml"
    path.write_text(f"[source]\nmodel = '{narrow}'\n[quantize]\ntype = ['Q5_K_S', 'q8_0']\nfor = 'llama.cpp'\n")
    assert mill("run", path, "-o", tmp_path / "out")[0] == 0
    types = {t.type.name for t in open_gguf(tmp_path / "out/m-Q5_K_S.gguf").tensors.values()}
    assert "q5_1" in types
    path.write_text(path.read_text() + "[repack]\n")
    code, _, err = mill("run", path, "-o", tmp_path / "other")
    assert code == 1
    assert "interleaved rows, which llama.cpp does not know" in err
    path.write_text(
        f"[source]\nmodel = '{DEMO}'\n[[quantize]]\ntype = 'q8_0'\nfor = 'llama.cpp'\n[[quantize]]\ntype = 'iq4_k'\n"
    )
    code, _, err = mill("run", path, "-o", tmp_path / "other")
    assert code == 1
    assert "different layouts of latent attention" in err
    path.write_text(path.read_text().replace("llama.cpp", "lama"))
    assert "for = 'lama' has to be one of llama.cpp, ik_llama.cpp, ollama" in mill("run", path)[2]


def test_stand_ins_are_known():
    for program in PROGRAMS:
        types, loader = LoaderTypes(program), LOADERS[program]
        named = [*loader.fallbacks.values(), *loader.stand_ins.values()]
        assert all(types.reads(TYPES[name]) for name in named)
        assert all(types.reads(TYPES[name]) for name in types.usual(list(TYPES)) if TYPES[name].is_known)
    with pytest.raises(PlanError, match="there are llama.cpp, ik_llama.cpp, ollama"):
        LoaderTypes("vllm")


def test_files_of_a_split():
    tensors = {"output.weight": LoaderTensor((256, 256), TYPES["q8_0"])}
    metadata = {"general.architecture": "llama"}
    assert loader_problems(metadata, tensors, "ollama") == loader_problems(metadata, tensors, "llama.cpp", 3) == []
    assert loader_problems(metadata, tensors, "ollama", 3) == ["it does not take models in several files"]
