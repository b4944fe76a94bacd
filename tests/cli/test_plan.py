"""`plan` on DeepSeek-V3 in full size, against what ik_llama.cpp logged when it loaded the published files."""

import json
from functools import partial

import pytest

MIB = 1 << 20


@pytest.fixture
def plan(mill):
    return partial(mill, "plan")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "rules", "cpu", "gpu"),
    [
        ("deepseek-v3-iq4_k_r4", "exps=CPU", 376768.00 + 938.98, 17743.99),
        ("deepseek-r1-0528-dq4_k_r4", "exps=CPU,attn_kv_b=CPU", 405413.00 + 938.98, 17743.99 - 1037.00),
        ("deepseek-r1-0528-iq2_k_r4", "exps=CPU", 212744.00 + 580.45, 10951.30),
    ],
)
def test_logged_sizes(plan, header_only_deepseek_v3, recipe, rules, cpu, gpu):
    arguments = (
        header_only_deepseek_v3,
        "--no-vocab",
        "--recipe",
        recipe,
        "--vram",
        "24GiB",
        "-ot",
        rules,
        "-ctk",
        "q8_0",
        "-amb",
        512,
    )
    code, out, err = plan(*arguments, "--json")
    assert code == 0, err
    result = json.loads(out)
    devices = {d["name"]: d for d in result["devices"]}
    assert devices["CPU"]["weights"] / MIB == pytest.approx(cpu, abs=0.01)
    assert devices["CUDA0"]["weights"] / MIB == pytest.approx(gpu, abs=0.01)
    assert devices["CUDA0"]["cache"] / MIB == pytest.approx(1166.62, abs=0.01)
    assert devices["CUDA0"]["compute"] / MIB == pytest.approx(3425.00, rel=0.001)
    assert devices["CPU"]["cache"] == devices["CPU"]["compute"] == 0
    assert result["fits"]
    assert result["warnings"] == []


def test_warnings_for_interleaved_rows_on_a_gpu_and_unused_rules(plan, header_only_deepseek_v3_layers):
    rules = r"blk\.3\.ffn_.*_exps=CUDA0,exps=CPU,ffn_gate_exps=CUDA0"
    code, _, err = plan(
        header_only_deepseek_v3_layers, "--no-vocab", "--recipe", "deepseek-v3-iq2_k_r4", "--vram", "32GiB", "-ot", rules
    )
    assert code == 0
    assert r"warning: -ot ffn_gate_exps=CUDA0 does nothing: blk\.3\.ffn_.*_exps=CUDA0 comes first" in err
    assert "blk.3.ffn_gate_exps.weight (iq2_k_r4) and 2 more would lie on CUDA0" in err


@pytest.mark.slow
def test_the_largest_that_fits_is_chosen(plan, header_only_deepseek_v3):
    arguments = (header_only_deepseek_v3, "--no-vocab", "--vram", "24GiB", "-ot", "exps=CPU", "-ctk", "q8_0")
    result = json.loads(plan(*arguments, "--ram", "256GiB", "--json")[1])
    fitting = [c for c in result["candidates"] if c["fits"]]
    assert result["fits"]
    assert result["total_bytes"] == max(c["total_bytes"] for c in fitting)
    assert {"deepseek-v3-iq2_k_r4.txt", "Q2_K", "IQ3_XXS"} <= {c["recipe"] for c in fitting}
    assert "deepseek-v3-iq4_k_r4.txt" in {c["recipe"] for c in result["candidates"] if not c["fits"]}


def test_nothing_larger_than_the_model_is_tried(plan, tiny_llama, write_checkpoint, tmp_path):
    folder = write_checkpoint(tmp_path / "m", *tiny_llama(intermediate_size=64))
    for file_type in ("bf16", "f16"):
        path = tmp_path / f"{file_type}.gguf"
        assert plan.func("convert", folder, path, "--outtype", file_type)[0] == 0
        result = json.loads(plan(path, "--json", "-c", 16)[1])
        assert result["recipe"] == file_type.upper()
        assert result["total_bytes"] == max(c["total_bytes"] for c in result["candidates"])
        assert not ({"F32", "BF16", "F16"} - {file_type.upper()}) & {c["recipe"] for c in result["candidates"]}
        assert "Q8_0" in {c["recipe"] for c in result["candidates"]}


def test_the_smallest_is_shown_if_nothing_fits(plan, tiny_llama, write_checkpoint, tmp_path):
    folder = write_checkpoint(tmp_path / "m", *tiny_llama(intermediate_size=64))
    code, out, err = plan(folder, "--ram", "10K", "-c", 16)
    assert code == 1
    assert "CPU" in out
    assert "CPU lacks" in err
    assert "nothing fits: put less on" in err
    assert json.loads(plan(folder, "--ram", "10K", "-c", 16, "--json")[1])["fits"] is False
    code, _, err = plan(folder, "--ram", "10K", "-c", 16, "--type", "q4_0")
    assert (code, "it does not fit: " in err) == (1, True)


def test_a_quantised_file_counts_as_it_is(plan, tiny_llama, write_checkpoint, tmp_path):
    folder = write_checkpoint(tmp_path / "m", *tiny_llama(intermediate_size=64))
    assert plan.func("quantize", folder, tmp_path / "q.gguf", "q8_0")[0] == 0
    code, out, _ = plan(tmp_path / "q.gguf", "--cpu-moe", "-c", 256, "--tensors")
    assert code == 0
    assert "as it is" in out
    assert "blk.1.ffn_down.weight" in out


def test_wrong_usage_is_one_line(plan, tiny_llama, write_checkpoint, tmp_path):
    folder = write_checkpoint(tmp_path / "m", *tiny_llama(intermediate_size=64))
    for arguments, reason in (
        (("-ot", "exps"), "is not `regex=CPU`"),
        (("-ot", "exps=CUDA0"), "there is no CUDA0"),
        (("-fa", "off", "-ctv", "q8_0"), "need flash attention"),
        (("-mla", "3"), "-mla 3 has no effect"),
    ):
        code, _, err = plan(folder, "--type", "q8_0", *arguments)
        assert code == 1
        assert reason in err
