"""Sparse attention: the keys or blocks of keys that an indexer selects, and attention over these alone.

A token's results differ from dense attention only when there are more than top_k keys, or blocks. Then they are computed again,
by numpy, in the place of the dense ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ....graph import Value
from ....graph.ops import Attention, SelectBlocks, SelectKeys
from ..latent_matrices import LatentLayer
from ..memory import View, with_heads
from ..pass_program import PassProgram
from ..pass_tasks import RunInputs
from .step import lowers


def _rows_that_select(state: RunInputs, layer: int, most: int, every: int = 1) -> Iterator[tuple[int, np.ndarray]]:
    """(row of the pass, the indexer's keys that it sees) of every token that sees more than `most` keys. every: tokens that
    share a key."""
    for cache, at in state.batch:
        first = max(0, (most + 1) * every - 1 - cache.length)
        if first >= at.stop - at.start:
            continue
        keys = cache.read(layer, "index_k", at.stop - at.start)[0]
        for row in range(at.start + first, at.stop):
            yield row, keys[: (cache.length + row - at.start + 1) // every]


@lowers(SelectKeys)
def select_keys(
    program: PassProgram,
    q: Value,
    k: Value,
    factors: Value | None,
    layer: int,
    top_k: int,
    every: int,
    open_run: bool,
    out: Value,
) -> None:
    heads, width = q.shape
    program.write_cache(layer, "index_k", with_heads(program.view(k), 1, width))
    queries, state = with_heads(program.dense(q), heads, width).array, program.run_inputs
    shares = None if factors is None else program.dense(factors).matrix
    to = program.new(out).matrix

    def select() -> None:
        to[:, 0] = -1
        for row, past in _rows_that_select(state, layer, top_k, every):
            products = np.maximum(queries[row] @ past.T, 0)
            scores = products.sum(axis=0) if shares is None else shares[row] @ products
            to[row, :top_k] = np.argpartition(-scores, top_k)[:top_k]
            to[row, top_k:] = len(past)  # of open_run

    program.call(select)


@lowers(SelectBlocks)
def select_blocks(program: PassProgram, q: Value, k: Value, layer: int, block: int, top_k: int, local: int, out: Value) -> None:
    heads, width = q.shape
    program.write_cache(layer, "index_k", with_heads(program.view(k), 1, width))
    queries, state = with_heads(program.dense(q), heads, width).array, program.run_inputs
    to = with_heads(program.new(out), heads, top_k).array

    def select() -> None:
        to[:] = -1
        for row, past in _rows_that_select(state, layer, top_k * block):
            scores = queries[row] @ past.T
            best = np.maximum.reduceat(scores, np.arange(0, scores.shape[1], block), axis=1)
            best[:, max(0, best.shape[1] - local) :] = np.inf
            to[row] = np.argpartition(-best, top_k - 1, axis=1)[:, :top_k]

    program.call(select)


def attend_blocks(op: Attention, out: PassProgram, q: View, result: View, selection: View) -> None:
    """Adds to the pass that the results of tokens with a selection are those of attention over the selected blocks.

    q and result: [n, heads, width]; selection: [n, index heads, top_k], as SelectBlocks gives it.
    """
    assert op.selection is not None
    state, (index_heads, top_k) = out.run_inputs, op.selection.shape
    queries, results, chosen = q.array, result.array, with_heads(selection, index_heads, top_k).array

    def attend() -> None:
        for cache, at in state.batch:
            rows = at.start + np.flatnonzero(chosen[at, 0, 0] >= 0)
            if not rows.size:
                continue
            new = at.stop - at.start
            keys, values = cache.read(op.layer, "k", new), cache.read(op.layer, "v", new)
            kv_heads, group = len(keys), queries.shape[1] // index_heads
            for row in rows:
                count = cache.length + row - at.start + 1
                for index in range(index_heads):
                    blocks = np.sort(chosen[row, index].astype(np.int64))
                    positions = (blocks[:, None] * op.block + np.arange(op.block)).reshape(-1)
                    positions = positions[positions < count]
                    for head in range(index * group, (index + 1) * group):
                        kv = head * kv_heads // queries.shape[1]
                        scores = keys[kv, positions, : queries.shape[2]] @ queries[row, head] * np.float32(op.scale)
                        weights = np.exp(scores - scores.max())
                        results[row, head] = weights @ values[kv, positions, : results.shape[2]] / weights.sum()

    out.call(attend)


def attend_selected(latent: LatentLayer, out: PassProgram, q: View, result: View, selection: View) -> None:
    """Adds to the pass that the results of tokens with a selection are those of attention over the selected keys.

    q: [n, heads, nope + rope]; result: [n, heads, v]; selection: [n, top_k], as SelectKeys gives it.
    """
    s, state, layer, scale = latent.shape, out.run_inputs, latent.op.layer, np.float32(latent.op.scale)
    queries, results, chosen = q.array, result.array, selection.matrix

    def weigh(scores: np.ndarray) -> np.ndarray:
        """softmax of scores [heads, keys]"""
        weights = np.exp((scores - scores.max(axis=1, keepdims=True)) * scale)
        return weights / weights.sum(axis=1, keepdims=True)

    def over_heads(row: int, positions: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
        scores = np.einsum("hw,hmw->hm", queries[row], keys[:, positions])
        results[row] = np.einsum("hm,hmv->hv", weigh(scores), values[:, positions, : s.v])

    def over_latents(rows: np.ndarray, latents: np.ndarray) -> None:
        wide = np.empty((len(rows), s.heads, s.rank + s.rope), np.float32)
        wide[..., s.rank :], nope = queries[rows, :, s.nope :], queries[rows, :, : s.nope].transpose(1, 0, 2)
        wide[..., : s.rank] = latent.matrices.absorb(nope, out.gemv).transpose(1, 0, 2)
        weighted = np.empty((len(rows), s.heads, s.rank), np.float32)
        for number, row in enumerate(rows):
            selected = latents[chosen[row].astype(np.int64)]
            weighted[number] = weigh(wide[number] @ selected.T) @ selected[:, : s.rank]
        results[rows] = latent.matrices.finish(weighted.transpose(1, 0, 2), out.gemv).transpose(1, 0, 2)

    def attend() -> None:
        for cache, at in state.batch:
            rows = at.start + np.flatnonzero(chosen[at, 0] >= 0)
            if not rows.size:
                continue
            new = at.stop - at.start
            if latent.mode:
                over_latents(rows, cache.read(layer, "kv", new)[0])
                continue
            keys, values = cache.read(layer, "k", new), cache.read(layer, "v", new)
            for row in rows:
                over_heads(row, chosen[row].astype(np.int64), keys, values)

    out.call(attend)
