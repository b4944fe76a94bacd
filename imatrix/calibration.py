"""What runs through the model: windows of tokens, each with the weight that its text was given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from ..formats import PlanError
from ..runtime import Model
from ..runtime.perplexity import windows_of


@dataclass(frozen=True)
class Calibration:
    """windows: int64 [n, n_ctx], in the order they run; weights: int64 [n], how often each counts."""

    windows: np.ndarray
    weights: np.ndarray
    datasets: list[str] = field(default_factory=list)

    @property
    def n_ctx(self) -> int:
        return self.windows.shape[1]

    @property
    def digest(self) -> str:
        return xxhash.xxh3_64_hexdigest(self.windows.tobytes())

    def counted(self, done: int) -> int:
        """How many windows the first `done` count as."""
        return int(self.weights[:done].sum())

    def groups(self, model: Model) -> Iterator[slice]:
        """Windows that run together: as many as fit into the model's batch, of one weight. The first runs alone, so that soon
        there is something to tell how long all will take."""
        together, at = max(1, model.settings.batch // self.n_ctx), 0
        while at < len(self.windows):
            most = self.weights[at : at + (together if at else 1)]
            size = int(np.argmax(most != most[0])) or len(most)
            yield slice(at, at + size)
            at += size

    def fingerprint(self, model: Model, *more: object) -> str:
        """Digest of all that the result depends on, to the last bit: model, windows, settings."""
        s = model.settings
        settings = (s.batch, s.ubatch, *s.cache_types, s.flash, s.mla, s.exact, s.repack, s.expert_reduction, s.attention_bytes)
        text = repr((model.source.identity, self.digest, self.weights.tobytes(), self.n_ctx, settings, more))
        return xxhash.xxh3_128_hexdigest(text.encode())


def cut(
    model: Model,
    stretches: Sequence[tuple[Sequence[int] | np.ndarray, int]],
    n_ctx: int,
    *,
    chunks: int | None = None,
    from_chunk: int = 0,
    datasets: Sequence[str] = (),
) -> Calibration:
    """Windows from stretches of (token ids, weight); what is left of a stretch behind its last whole window is dropped.

    from_chunk, chunks: leaves out so many windows at the beginning, and takes so many at most. Raises PlanError where no window
    is left.
    """
    windows, weights = [], []
    for tokens, weight in stretches:
        if len(tokens) >= n_ctx:
            windows.append(windows_of(model, np.asarray(tokens, np.int64), n_ctx, None))
            weights += [weight] * len(windows[-1])
    if not windows:
        longest = max((len(tokens) for tokens, _ in stretches), default=0)
        raise PlanError(f"the text has {longest} tokens, one window needs {n_ctx}: give more text or a smaller -c")
    if from_chunk >= len(weights):
        raise PlanError(f"--from-chunk {from_chunk}: the text has only {len(weights)} windows of {n_ctx} tokens")
    if chunks is not None and chunks < 1:
        raise PlanError(f"{chunks} windows cannot be collected from: at least 1")
    chosen = slice(from_chunk, None if chunks is None else from_chunk + chunks)
    return Calibration(np.concatenate(windows)[chosen], np.array(weights, np.int64)[chosen], list(datasets))
