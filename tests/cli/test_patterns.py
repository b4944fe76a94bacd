"""Regular expressions of options and recipes are matched in bounded time, and what goes wrong is one line."""

import pytest

from ggufmill.jobs import patterns
from ggufmill.recipes import FOLDER

DEMO = FOLDER / "demo"
ENDLESS = "(.|.|.)+[!?]"
CALLS = {
    "search": ("search", DEMO, "OUT", "--target-bpw", 6, "--gpu", ENDLESS, "--gpu-size", "1M"),
    "compare": ("compare", DEMO, DEMO, "--tensors", ENDLESS),
    "repack": ("repack", "GGUF", "OUT", "--pattern", ENDLESS),
    "quantize": ("quantize", DEMO, "OUT", "Q4_K_M", "--custom-q", f"{ENDLESS}=q8_0", "--dry-run", "--no-timing"),
    "recipe, [search]": ("quantize", DEMO, "OUT", "--recipe", "RECIPE", "--dry-run", "--no-timing"),
    "recipe, [repack]": ("run", "REPACK", "--dry-run"),
    "plan": ("plan", DEMO, "--vram", "1G", "-ot", f"{ENDLESS}=CUDA0"),
}
RECIPE = f"""
[quantize]
target_bpw = 6
[search]
gpu = '{ENDLESS}'
gpu_size = "1M"
"""
REPACK = f"""
[source]
model = "{DEMO.as_posix()}"
[quantize]
type = "q4_0"
[repack]
pattern = '{ENDLESS}'
"""


@pytest.mark.parametrize("call", CALLS)
def test_a_pattern_that_would_never_end_is_refused(mill, tmp_path, monkeypatch, call):
    monkeypatch.setattr(patterns, "TIME_LIMIT", 0.05)
    files = {name: tmp_path / name for name in ("OUT", "GGUF", "RECIPE", "REPACK")}
    files["RECIPE"] = files["RECIPE"].with_suffix(".toml")
    files["REPACK"] = files["REPACK"].with_suffix(".toml")
    files["RECIPE"].write_text(RECIPE, "utf-8")
    files["REPACK"].write_text(REPACK, "utf-8")
    if "GGUF" in CALLS[call]:
        assert mill("convert", DEMO, files["GGUF"], "--outtype", "q8_0")[0] == 0
    code, _, errors = mill(*(files.get(str(word), word) for word in CALLS[call]))
    line = errors.strip().splitlines()[-1]
    assert code == 1
    assert "takes more than 0.05 s; write it with fewer repeats" in line
    assert "Traceback" not in errors
    assert not files["OUT"].exists()
