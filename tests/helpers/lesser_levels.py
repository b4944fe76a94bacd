"""A program run at a low level of this processor and at its own level."""

import os
import subprocess
import sys


def output_at_each_level(script, folder):
    """What a Python program prints at each of the two levels, as a set. folder: of modules that it imports."""
    path = os.pathsep.join([folder, os.path.dirname(__file__)])
    printed = set()
    for level in ("x86-64-v2", None) if os.uname().machine == "x86_64" else ("portable", None):
        environment = {k: v for k, v in os.environ.items() if k != "GGUFMILL_CPU"} | {"PYTHONPATH": path}
        environment |= {"GGUFMILL_CPU": level} if level else {}
        run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        printed.add(run.stdout)
    return printed
