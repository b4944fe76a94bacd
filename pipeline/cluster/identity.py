"""What a worker has to have in common with the process that gives it work: other versions may make other bytes."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import llvmlite
import numba
import numpy as np

from ...jobs.code_digest import code_digest
from ...version import __version__


def program_identity() -> dict[str, str]:
    """What decides the bytes that this process makes: name -> version or digest."""
    return {
        "ggufmill": __version__,
        "code": code_digest(),
        "numba": numba.__version__,
        "llvmlite": llvmlite.__version__,
        "numpy": np.__version__,
        "Python": "{}.{}".format(*sys.version_info),
    }


def difference(own: Mapping[str, str], other: Mapping[str, str]) -> str:
    """What is different there, in words: 'numba 0.61.0 instead of 0.62.1'; '' if nothing is."""
    return ", ".join(
        f"{name} {other.get(name, 'unknown')} instead of {value}" for name, value in own.items() if other.get(name) != value
    )
