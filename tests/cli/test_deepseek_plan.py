"""Planning a 671 B model from headers alone: sizes as published, quickly and in little memory."""

import json
import os
import re
import subprocess
import sys

import pytest
from peak_memory import PEAK_BYTES

MEASURED = f"""
import sys
{PEAK_BYTES}
from ggufmill.cli import main
try:
    main(sys.argv[1:])
finally:
    print("peak", peak_bytes(), file=sys.stderr)
"""


@pytest.mark.slow
def test_size_of_a_published_file(header_only_deepseek_v3, tmp_path):
    """Those of others: test_recipes.py."""
    began = os.times().children_user
    arguments = ["quantize", header_only_deepseek_v3, tmp_path / "out.gguf", "--no-vocab"]
    arguments += ["--recipe", "deepseek-r1-0528-iq2_k_r4.txt", "--dry-run", "--no-timing", "--json"]
    done = subprocess.run([sys.executable, "-c", MEASURED, *arguments], capture_output=True, text=True, check=True)
    plan = json.loads(done.stdout)
    assert len(plan["tensors"]) == 1147
    assert round(plan["total_bytes"] / 2**30, 3) == 219.019
    assert round(plan["bits_per_weight"], 3) == 2.799
    assert int(re.search(r"peak (\d+)", done.stderr)[1]) < 2**30
    assert os.times().children_user - began < 20
    assert not list(tmp_path.iterdir())
