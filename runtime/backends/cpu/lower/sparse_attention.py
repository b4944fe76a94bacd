"""Sparse attention: the keys or blocks of keys that an indexer selects, and attention over these alone.

A token's results differ from dense attention only when there are more than top_k keys, or blocks. Selected blocks are brought
together by the tasks of each token (`attend_blocks`). Latents of generated tokens are read where they lie (`attend_listed`); of
prompts see latent_batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from .....formats import TYPES, PlanError
from .....simd import team
from ....graph import Value
from ....graph.ops import Attention, LatentAttention, SelectBlocks, SelectKeys
from ..attention import AttentionParams
from ..kernels import runs
from ..kernels.attention import flash, listed_rows, token_selection
from ..kernels.attention.block_panels import BLOCK
from ..kernels.attention.byte_keys import BYTE_SCORES, round_byte_queries, score_bytes
from ..kernels.attention.cache_rows import BYTES, TYPE_IDS
from ..kernels.attention.index_scores import SCORES, score_keys
from ..kernels.attention.job_parts import parts_of
from ..kernels.attention.largest_scores import LARGEST, take_largest
from ..kernels.attention.token_selection import KEYS
from ..kv_cache import CacheRows, encode_with_nan
from ..latent_matrices import takes_bytes
from ..memory import View, with_heads
from ..pass_program import PassProgram
from .recurrent import sequences
from .step import lowers

_TASKS, _LEAST_HEADS = 3, 8  # of attention, for each thread; that a task has, as far as there are so many
_PARALLEL_SCORES = 1 << 13  # of which the largest are taken: some ten microseconds
_TOKENS, _TOKENS_OF_TASK = 16, 4  # that are scored at a time; that share what is read of the keys


def _scores(
    program: PassProgram, layer: int, queries: np.ndarray, factors: np.ndarray | None, every: int, most: int
) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """Of the tokens that see more than `most` keys, each of `every` tokens, some at a time: rows of the pass, int64 numbers of
    keys that they see, and scores float32 [tokens, keys, and others behind them].

    queries: float32 [n, heads, width]; factors: float32 [n, heads]"""
    heads, width = queries.shape[1:]
    as_bytes = not width % BLOCK and _takes_bytes(program, layer)
    rounded = np.empty((_TOKENS * heads, 2 * width if as_bytes else 0), np.uint8)
    for cache, at in program.run_inputs.batch:
        first = max(0, (most + 1) * every - 1 - cache.length)
        keys = cache.rows(layer, "index_k", at.stop - at.start)
        if as_bytes and first < at.stop - at.start:
            rows = cache.read(layer, "index_k", at.stop - at.start)[0]
            keys = CacheRows.of(encode_with_nan(rows, "q8_0")[None], BYTES)
        for begin in range(at.start + first, at.stop, _TOKENS):
            tokens = np.arange(begin, min(begin + _TOKENS, at.stop))
            counts = (cache.length + tokens - at.start + 1) // every
            size = -(-int(counts[-1]) // KEYS) * KEYS
            found = np.empty((len(tokens), size), np.float32)
            records = np.zeros(-(-len(tokens) // _TOKENS_OF_TASK), SCORES)
            rounding, stages = np.zeros(len(records), BYTE_SCORES), []
            for number, row in enumerate(range(0, len(tokens), _TOKENS_OF_TASK)):
                own = slice(row, min(row + _TOKENS_OF_TASK, len(tokens)))
                q, out = queries[begin + row :], found[own]
                of_heads = 0 if factors is None else factors[begin + row :].ctypes.data
                sizes = (int(counts[own][-1]), of_heads, 0, out.ctypes.data, size, KEYS, 0, 0)
                if as_bytes:
                    to = rounded[row * heads :].ctypes.data
                    words = {"queries": q.ctypes.data, "rounded": to, "rows": len(out) * heads, "width": width}
                    for name, word in words.items():
                        rounding[name][number] = word
                    stages.append((0, round_byte_queries.address, rounding[number:].ctypes.data, 1))
                    sizes = (*sizes[:-2], to, score_bytes.address)
                records[number] = (q.ctypes.data, len(out), heads, width, keys.address, keys.row_bytes, *sizes)
            stages += [
                (1, score_keys.address, records.ctypes.data + i * records.itemsize, -(-int(record["count"]) // KEYS))
                for i, record in enumerate(records)
            ]
            team.run(program.workers.ready(), np.array(stages, np.int64))
            yield slice(begin, begin + len(tokens)), counts, found


def _takes_bytes(program: PassProgram, layer: int) -> bool:
    """Whether scores of keys may be products of bytes: those of attention to the keys that they select are."""
    compiled = program.compiled
    latent = [op for op in compiled.all_ops if isinstance(op, LatentAttention) and op.layer == layer]
    rounds = [takes_bytes(compiled.store, op, compiled.part(layer, "kv")) for op in latent]
    return program.settings.mla > 1 and bool(rounds) and all(rounds)


def _take_largest(program: PassProgram, scores: np.ndarray, counts: np.ndarray, to: np.ndarray) -> None:
    """The numbers of the largest scores, ascending, into float32 [tokens, how many]. scores: float32 [tokens, n], of which
    counts int64 [tokens] are compared."""
    task = np.zeros(1, LARGEST)
    addresses = scores.ctypes.data, 1, scores.shape[1], counts.ctypes.data
    task[0] = (*addresses, to.shape[1], 0, to.ctypes.data, to.strides[0], 0)
    workers = program.workers.ready() if scores.size >= _PARALLEL_SCORES else 0
    team.run(workers, np.array([(0, take_largest.address, task.ctypes.data, len(scores))], np.int64))


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
    queries, by_head = program.dense(q), None if factors is None else program.dense(factors)
    result = program.new(out)
    if program.gemv:
        sizes = {"every": every, "top": top_k, "chosen": 1, "block": 0}
        _select_by_tasks(program, layer, with_heads(queries, heads, width), by_head, sizes, result, open_run=int(open_run))
        return
    matrix, to = None if by_head is None else by_head.matrix, result.matrix
    rows_of_heads = with_heads(queries, heads, width).array

    def select() -> None:
        to[:, 0] = -1
        for rows, counts, scores in _scores(program, layer, rows_of_heads, matrix, every, top_k):
            _take_largest(program, scores, counts, to[rows, :top_k])
            to[rows, top_k:] = counts[:, None]  # of open_run

    program.call(select)


def _select_by_tasks(
    program: PassProgram,
    layer: int,
    queries: View,
    factors: View | None,
    sizes: Mapping[str, int],
    result: View,
    open_run: int = 0,
    always: int = 0,
) -> None:
    """Adds tasks that select for each token by itself, however many keys there are by then. queries: [n, heads, width]; sizes,
    open_run, always: operands of token_selection."""
    at, tables, heads = program.names.index("index_k"), program.row_addresses, sizes["chosen"]
    memory = program.scores_of(sizes["every"] * max(1, sizes["block"]), heads)
    tokens = {"ranges": program.ranges, "lengths": program.lengths, "scores": memory, **sizes}
    keys = {"keys": tables[:, layer, at], "key_step": tables.strides[0], "heads": queries.heads, "width": queries.width}
    shares = 1 if program.threads == 1 else _TASKS * program.threads
    scores, cached = program.cache_view(-1, "scores"), program.cache_view(layer, "index_k")
    program.task(
        token_selection.score_tokens,
        program.n * shares,
        **{"q": queries, "factors": factors, "shares": shares, "score": score_keys.address, **keys, **tokens},
        reads=(cached,),
        writes=(scores,),
    )
    take = {"out": result, "open_run": open_run, "always": always, "take": take_largest.address}
    program.task(token_selection.select_keys, program.n * heads, **take, **tokens, reads=(scores,))


@lowers(SelectBlocks)
def select_blocks(program: PassProgram, q: Value, k: Value, layer: int, block: int, top_k: int, local: int, out: Value) -> None:
    heads, width = q.shape
    program.write_cache(layer, "index_k", with_heads(program.view(k), 1, width))
    sizes = {"every": 1, "top": top_k, "chosen": heads, "block": block}
    _select_by_tasks(program, layer, with_heads(program.dense(q), heads, width), None, sizes, program.new(out), always=local)


def attend_blocks(op: Attention, out: PassProgram, q: View, result: View) -> None:
    """Adds to the pass that the results of tokens with a selection are those of attention over the selected blocks.

    q and result: [n, heads, width], dense; queries take part in the rotations of keys, and results in those of values."""
    assert op.selection is not None
    selection, (chosen, top_k) = out.dense(op.selection), op.selection.shape
    keys, values = out.compiled.part(op.layer, "k"), out.compiled.part(op.layer, "v")
    kv_heads, types = keys.heads, (TYPE_IDS[keys.type], TYPE_IDS[values.type])
    if kv_heads % chosen and chosen % kv_heads:
        raise PlanError(f"layer {op.layer} has {chosen} index heads for {kv_heads} key heads: one has to divide the other")
    units = max(kv_heads, chosen)
    products = parts_of(*types, out.gemv, q.heads // units, q.width)
    names, tables = [out.names.index(name) for name in "kv"], out.row_addresses
    numbers = {"heads": q.heads, "kv_heads": kv_heads, "chosen": chosen, "units": units, "top": top_k, "block": op.block}
    numbers |= {"k_type": types[0], "v_type": types[1], "k_width": q.width, "v_width": result.width, "is_split": out.gemv}
    numbers |= {"score_part": products.score_part, "value_part": products.value_part}
    numbers |= {"attend": flash.attend_of(*types).address}
    out.task(
        listed_rows.attend_blocks,
        out.n * units,
        **{"q": q, "out": result, "selection": selection, "ranges": out.ranges, "lengths": out.lengths},
        **{"keys": tables[:, op.layer, names[0]], "values": tables[:, op.layer, names[1]], "row_step": tables.strides[0]},
        **{"scale": op.scale, "reads": [out.cache_view(op.layer, name) for name in "kv"]},
        **numbers,
    )


def can_list(out: PassProgram, layer: int, name: str) -> bool:
    """Whether `attend_listed` reads a layer's cached rows of a name."""
    part = out.compiled.part(layer, name)
    return TYPES[part.type].is_float and not part.rotation


def attend_listed(
    out: PassProgram,
    layer: int,
    name: str | None,
    q: View,
    result: View,
    params: AttentionParams,
    selection: View | None,
    every: int = 1,
    kv: View | None = None,
) -> None:
    """Adds attention with one key head to the pass, a task for some heads of each token, which finds the rows that it sees.

    q [n, heads, width], dense; result [n, heads, width of values], dense: values are the first numbers of keys
    name       of the cached rows, each of `every` tokens; None: there are none
    selection  [n, top_k], as SelectKeys gives it; None: all are seen
    kv         rows of the tokens, of which the last ones are seen as they are: those before the pass are the state 'window'
    """
    size, stride = (0, 0) if kv is None else out.compiled.layers[layer].states["window"].padded_shape
    of_state = (
        {"ranges": out.ranges, "states": out.state_addresses, "offset": 0} if kv is None else sequences(out, layer, "window")
    )
    of_state["lengths"] = out.lengths
    type_id = TYPE_IDS["f32" if name is None else out.compiled.part(layer, name).type]
    heads, row_type = q.heads, type_id if kv is None else TYPE_IDS["f32"]
    products = parts_of(row_type, row_type, out.gemv, heads, q.width)
    # Some tasks for each thread; each brings its rows together by itself.
    parts = -(-_TASKS * out.threads // out.n) if out.threads > 1 else 1
    members = max(-(-heads // parts), min(heads, _LEAST_HEADS))
    numbers = {"heads": heads, "members": members, "k_width": q.width, "v_width": result.width, "scale": params.scale}
    numbers |= {"window": size, "stride": stride, "every": 0 if name is None else every, "is_split": out.gemv}
    numbers |= {"top": 0 if selection is None else selection.size, "type_id": type_id, "row_type": row_type}
    numbers |= {"score_part": products.score_part, "value_part": products.value_part}
    numbers |= {"attend": flash.attend_floats.address, "gather": listed_rows.gather.address}
    out.task(
        listed_rows.attend_listed,
        out.n * -(-heads // members),
        **{"q": q, "kv": kv, "out": result, "selection": selection, "sinks": params.sinks},
        **{"entries": None if name is None else out.row_addresses[:, layer, out.names.index(name)]},
        **{"entry_step": out.row_addresses.strides[0], "reads": () if name is None else (out.cache_view(layer, name),)},
        **numbers,
        **of_state,
    )
    if kv is not None:
        last = {"x": kv, "width": q.width, "size": size, "stride": stride}
        out.task(runs.keep_last, len(out.counts) * -(-size // runs.ROW_STEP), **last, **of_state)
