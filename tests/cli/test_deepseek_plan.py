"""Planning a 671 B model from headers alone: sizes as published, quickly and in little memory."""

import json
import os
import re
import subprocess
import sys

import pytest
from peak_memory import PEAK_BYTES

RECIPES = [
    ("deepseek-v3-iq4_k_r4.txt", 386.183, 4.936),
    ("deepseek-r1-0528-iq4_ks_r4.txt", 367.774, 4.701),
    ("deepseek-v3-iq2_k_r4.txt", 226.003, 2.889),
    ("deepseek-r1-0528-dq4_k_r4.txt", 413.144, 5.281),
    ("deepseek-r1-0528-iq2_k_r4.txt", 219.019, 2.799),
]

MEASURED = f"""
import sys
{PEAK_BYTES}
from ggufmill.cli import main
try:
    main(sys.argv[1:])
finally:
    print("peak", peak_bytes(), file=sys.stderr)
"""


@pytest.mark.slow(keep=["deepseek-r1-0528-iq2_k_r4*"])
@pytest.mark.parametrize(("recipe", "gib", "bits"), RECIPES)
def test_sizes_of_published_files(header_only_deepseek_v3, tmp_path, recipe, gib, bits):
    began = os.times().children_user
    arguments = ["quantize", header_only_deepseek_v3, tmp_path / "out.gguf", "--no-vocab", "--recipe", recipe]
    arguments += ["--dry-run", "--no-timing", "--json"]
    done = subprocess.run([sys.executable, "-c", MEASURED, *arguments], capture_output=True, text=True, check=True)
    plan = json.loads(done.stdout)
    assert len(plan["tensors"]) == 1147
    assert round(plan["total_bytes"] / 2**30, 3) == gib
    assert round(plan["bits_per_weight"], 3) == bits
    assert int(re.search(r"peak (\d+)", done.stderr)[1]) < 2**30
    assert os.times().children_user - began < 20
    assert not list(tmp_path.iterdir())
