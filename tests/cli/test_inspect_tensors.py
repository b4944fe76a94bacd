"""The tensors of a file one by one in `inspect`: bits, and the rule that gave each its type; and those that are asked for."""

import json

import pytest

from ggufmill.recipes import FOLDER


def inspected(mill, *arguments):
    code, out, err = mill("inspect", *arguments, "--json")
    assert code == 0, err
    result = json.loads(out)
    return {tensor["name"]: tensor for tensor in result["tensors"]}, result


@pytest.fixture
def quantized(mill, tmp_path):
    def make(*arguments):
        code, _, err = mill("quantize", FOLDER / "demo", tmp_path / "q.gguf", *arguments, "--json")
        assert code == 0, err
        plan = json.loads(mill("quantize", FOLDER / "demo", tmp_path / "d.gguf", *arguments, "--dry-run", "--json")[1])
        return tmp_path / "q.gguf", {tensor["name"]: tensor for tensor in plan["tensors"]}

    return make


@pytest.mark.parametrize(
    "arguments",
    [("Q4_K_M",), ("q8_0",), ("--recipe", "deepseek-v3-iq4_k_r4.txt"), ("--custom-q", "attn_.*=q6_K,ffn_.*=iq4_k", "q8_0")],
    ids=lambda arguments: arguments[-1],
)
def test_the_file_tells_what_the_plan_told(mill, quantized, arguments):
    path, planned = quantized(*arguments)
    tensors, result = inspected(mill, path)
    rules = {name: tensor["rule"] for name, tensor in tensors.items()}
    same = {"default": "Q8_0"}  # a type by itself is a file type, too
    assert rules == {name: same.get(tensor["rule"], tensor["rule"]) for name, tensor in planned.items()}
    assert {name: tensor["note"] or "" for name, tensor in tensors.items()} == {
        n: t.get("note", "") for n, t in planned.items()
    }
    assert tensors["output.weight"]["bits"] == pytest.approx(8 * tensors["output.weight"]["nbytes"] / (256 * 1536))
    assert result["n_tensors"] == len(tensors)


def test_what_an_option_decided_has_no_rule(mill, quantized):
    path, _ = quantized("Q4_K_M", "--token-embedding-type", "q8_0")
    tensors, _ = inspected(mill, path)
    assert tensors["token_embd.weight"]["rule"] is None
    assert tensors["output.weight"]["rule"].startswith("Q4_K_M: output")


def test_tensors_by_name(mill, quantized):
    path, _ = quantized("Q4_K_M")
    tensors, result = inspected(mill, path, "--tensors", r"blk\.1\.attn_.*weight", "--checksums")
    assert 0 < len(tensors) < result["n_tensors"]
    assert all("blk.1.attn_" in name and tensor["xxh3"] for name, tensor in tensors.items())
    code, text, _ = mill("inspect", path, "--tensors", r"blk\.1\.attn_q_a")
    assert code == 0
    heading, _, first, _, _, _, last = (
        text.splitlines() if len(text.splitlines()) == 7 else [*text.splitlines()[:3], "", "", "", text.splitlines()[-1]]
    )
    assert heading.split() == ["tensor", "shape", "type", "bits", "bytes", "rule"]
    assert first.split()[0] == "blk.1.attn_q_a.weight"
    assert "tensors" in last
    code, _, err = mill("inspect", path, "--tensors", "nothing_like_it")
    assert code == 2
    assert "no tensor of" in err
