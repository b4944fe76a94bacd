"""What runs through the model: windows of tokens, each with the weight that its text was given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from ..formats import PlanError
from ..runtime import Model
from ..runtime.evaluate.perplexity import windows_of

MOST = (1 << 31) - 1  # windows that a file can say it is of


@dataclass(frozen=True)
class Stretch:
    """Token ids of texts of one weight, one after the other; starts: (a text's name, where its first token is), in order."""

    tokens: Sequence[int] | np.ndarray
    weight: int = 1
    starts: Sequence[tuple[str, int]] = ()

    def names(self, low: int, end: int) -> list[str]:
        """The texts that have a token among those from low to end."""
        ends = [*(at for _, at in self.starts[1:]), len(self.tokens)]
        return [name for (name, at), stop in zip(self.starts, ends, strict=False) if max(at, low) < min(stop, end)]


@dataclass(frozen=True)
class Calibration:
    """windows: int64 [n, n_ctx], in the order they run; weights: int64 [n], how often each counts; datasets: names of the texts
    that have a part in them."""

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
    model: Model, stretches: Sequence[Stretch], n_ctx: int, *, chunks: int | None = None, from_chunk: int = 0
) -> Calibration:
    """Windows from stretches; what is left of one behind its last whole window is dropped.

    from_chunk, chunks: leaves out so many windows at the beginning, and takes so many at most. Raises PlanError where no window
    is left, or a stretch that the windows should reach does not fill one.
    """
    if chunks is not None and chunks < 1:
        raise PlanError(f"{chunks} windows cannot be collected from: at least 1")
    end = MOST if chunks is None else from_chunk + chunks
    windows, weights, datasets = [], [], []
    for stretch in stretches:
        tokens, before = np.asarray(stretch.tokens, np.int64), len(weights)
        if before >= end:
            break
        if len(tokens) < n_ctx:
            raise PlanError(_too_short(stretch, len(stretches), n_ctx))
        windows.append(windows_of(model, tokens, n_ctx, None))
        weights += [stretch.weight] * len(windows[-1])
        first, last = (min(max(at - before, 0), len(windows[-1])) for at in (from_chunk, end))
        datasets += stretch.names(first * n_ctx, last * n_ctx)
    if not windows:
        raise PlanError(f"the text has 0 tokens, one window needs {n_ctx}: give more text or a smaller -c")
    if from_chunk >= len(weights):
        raise PlanError(f"--from-chunk {from_chunk}: the text has only {len(weights)} windows of {n_ctx} tokens")
    chosen = np.array(weights[from_chunk:end], np.int64)
    if chosen.sum() > MOST:
        raise PlanError(f"the windows count as {chosen.sum()} by their weights, a file can hold {MOST}: give smaller weights")
    return Calibration(np.concatenate(windows)[from_chunk:end], chosen, datasets)


def _too_short(stretch: Stretch, among: int, n_ctx: int) -> str:
    text = " and ".join(name for name, _ in stretch.starts) or "the text"
    has = f"{text} {'have' if len(stretch.starts) > 1 else 'has'} {len(stretch.tokens)} tokens, one window needs {n_ctx}"
    alone = "; texts of another weight do not fill it up" if among > 1 else ""
    return f"{has}{alone}: give more text or a smaller -c"
