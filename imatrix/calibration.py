"""The calibration text as windows of tokens, each with the weight of its text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field

import numpy as np
import xxhash

from ..data_classes import dataclass
from ..formats import PlanError
from ..jobs.code_digest import code_digest
from ..runtime import Model
from ..runtime.evaluate.perplexity import make_windows

MAX_CHUNKS = (1 << 31) - 1  # windows that a file can record


@dataclass(frozen=True)
class TextSegment:
    """The token ids of consecutive texts of one weight; starts: (name of a text, index of its first token), in order."""

    tokens: Sequence[int] | np.ndarray
    weight: int = 1
    starts: Sequence[tuple[str, int]] = ()

    def text_names(self, start: int, stop: int) -> list[str]:
        """The texts with a token in [start, stop)."""
        ends = [*(first for _, first in self.starts[1:]), len(self.tokens)]
        texts = zip(self.starts, ends, strict=False)
        return [name for (name, first), end in texts if max(first, start) < min(end, stop)]


@dataclass(frozen=True)
class Calibration:
    """The windows of a collection.

    windows   int64 [n, n_ctx], in the order in which they run
    weights   int64 [n], how many times each counts
    datasets  names of the texts with a token in them
    """

    windows: np.ndarray
    weights: np.ndarray
    datasets: list[str] = field(default_factory=list)

    @property
    def n_ctx(self) -> int:
        """Tokens per window."""
        return self.windows.shape[1]

    @property
    def digest(self) -> str:
        """xxh3-64 of the windows' tokens, in hex."""
        return xxhash.xxh3_64_hexdigest(self.windows.tobytes())

    def weighted_count(self, n: int) -> int:
        """The sum of the weights of the first n windows."""
        return int(self.weights[:n].sum())

    def batches(self, model: Model) -> Iterator[slice]:
        """Consecutive windows of one weight that run together, as many as fit into the model's batch. The first window runs
        alone, so that an estimate of the total time comes soon."""
        per_batch, start = max(1, model.settings.batch // self.n_ctx), 0
        while start < len(self.windows):
            weights = self.weights[start : start + (per_batch if start else 1)]
            size = int(np.argmax(weights != weights[0])) or len(weights)
            yield slice(start, start + size)
            start += size

    def fingerprint(self, model: Model, *options: object) -> str:
        """Digest of everything that the result depends on, to the last bit: model, windows, settings, options, this code."""
        s = model.settings
        settings = (s.batch, *s.cache_choices, s.flash, s.mla, s.exact, s.repack, s.expert_reduction, s.attention_bytes)
        settings += ("fast",) if s.fast else ()
        settings += ("round_activations",) if s.round_activations else ()
        settings += s.lora
        text = repr((code_digest(), model.source.identity, self.digest, self.weights.tobytes(), self.n_ctx, settings, options))
        return xxhash.xxh3_128_hexdigest(text.encode())


def cut_windows(
    model: Model, segments: Sequence[TextSegment], n_ctx: int, *, chunks: int | None = None, from_chunk: int = 0
) -> Calibration:
    """Segments -> windows of n_ctx tokens; the rest of a segment after its last complete window is dropped.

    from_chunk: windows to skip at the beginning; chunks: windows to take at most. Raises PlanError if no window is left, or a
    segment from which windows are needed does not fill one.
    """
    if chunks is not None and chunks < 1:
        raise PlanError(f"{chunks} windows cannot be collected from: at least 1")
    end = MAX_CHUNKS if chunks is None else from_chunk + chunks
    windows, weights, datasets = [], [], []
    for segment in segments:
        tokens, n_before = np.asarray(segment.tokens, np.int64), len(weights)
        if n_before >= end:
            break
        if len(tokens) < n_ctx:
            raise PlanError(_too_short(segment, len(segments), n_ctx))
        windows.append(make_windows(model, tokens, n_ctx, None))
        weights += [segment.weight] * len(windows[-1])
        first, last = (min(max(i - n_before, 0), len(windows[-1])) for i in (from_chunk, end))
        datasets += segment.text_names(first * n_ctx, last * n_ctx)
    if not windows:
        raise PlanError(f"the text has 0 tokens, one window needs {n_ctx}: give more text or a smaller -c")
    if from_chunk >= len(weights):
        raise PlanError(f"--from-chunk {from_chunk}: the text has only {len(weights)} windows of {n_ctx} tokens")
    selected = np.array(weights[from_chunk:end], np.int64)
    if selected.sum() > MAX_CHUNKS:
        raise PlanError(
            f"the windows count as {selected.sum()} by their weights, a file can hold {MAX_CHUNKS}: give smaller weights"
        )
    return Calibration(np.concatenate(windows)[from_chunk:end], selected, datasets)


def _too_short(segment: TextSegment, n_segments: int, n_ctx: int) -> str:
    text = " and ".join(name for name, _ in segment.starts) or "the text"
    verb = "have" if len(segment.starts) > 1 else "has"
    hint = "; texts of another weight do not fill it up" if n_segments > 1 else ""
    tokens = len(segment.tokens)
    return f"{text} {verb} {tokens} tokens, one window needs {n_ctx}{hint}: give more text or a smaller -c"
