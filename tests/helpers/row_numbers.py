"""Vectors as kernels of the torch backend multiply them."""

import numpy as np


def vector_numbers(made, columns):
    """What `VectorBytes` stand for: [n, columns]."""
    words, part = made.words.cpu().numpy(), made.part_words
    high, low = (np.ascontiguousarray(words[:, at : at + columns // 4]).view(np.int8).astype(int) for at in (0, part))
    scales = np.ascontiguousarray(words[:, 2 * part : 2 * part + columns // 32]).view(np.float32)
    return (256 * high + low) * np.repeat(scales, 32, axis=1)
