"""Reading a run of bytes of a file into memory of our own.

Jobs that walk through a whole model read so rather than through the mapping: mapped pages count as memory of the process
until the system takes them back, and a job's peak would grow with the model.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from .errors import FormatError


def read_span(path: Path, offset: int, nbytes: int) -> np.ndarray:
    """uint8 [nbytes] from that byte on. Raises FormatError when the file ends before, or cannot be read."""
    out = np.empty(nbytes, np.uint8)
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            done = 0
            while done < nbytes:
                count = os.preadv(handle, [out[done:].data], offset + done)
                if count == 0:
                    raise FormatError(f"{path}: the file has become shorter: it ends at byte {offset + done}")
                done += count
        finally:
            os.close(handle)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    return out
