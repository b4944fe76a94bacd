"""Labels drawn from a model's own predictions, and the gradient of their loss at logits."""

from __future__ import annotations

import numpy as np
import torch
import xxhash
from torch import Tensor


def uniform_draws(seed: int, window: np.ndarray) -> np.ndarray:
    """float64 [n] from 0 to 1, of a counter-based generator (Philox) whose key is a digest of seed and tokens: they depend on
    nothing else."""
    key = xxhash.xxh3_128_intdigest(np.int64(seed).tobytes() + np.ascontiguousarray(window, np.int64).tobytes())
    return np.random.Generator(np.random.Philox(key=key)).random(len(window))


def loss_gradient(logits: Tensor, draws: np.ndarray) -> Tensor:
    """The gradient of the sum of -log p(label) at logits float32 [n, n_vocab]: p - 1 at the label, p elsewhere. A label is
    where the sum of probabilities passes the draw."""
    probabilities = torch.softmax(logits, dim=1)
    exact = probabilities.cpu() if logits.device.type == "mps" else probabilities  # which has no float64
    sums = exact.double().cumsum(dim=1)
    targets = torch.from_numpy(draws).to(sums.device)[:, None] * sums[:, -1:]
    labels = torch.searchsorted(sums, targets, right=True).clamp(max=logits.shape[1] - 1).to(logits.device)
    return probabilities.scatter_add(1, labels, torch.full_like(probabilities[:, :1], -1.0))
