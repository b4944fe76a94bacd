"""Attention whose scores never leave the processor's cache (FlashAttention-2, arXiv:2307.08691, section 3.1).

A task takes some queries of one or more key heads through the keys, in blocks of KEYS: scores, maximum and sum of each query,
weighted values. Keys and values of a block are decoded once for all queries of the task, whatever type
they have in memory. Sums take one of two orders, neither of which depends on the tasks or on other queries:

- of prompts: block after block, the sums scaled whenever a maximum grows;
- of tokens that are generated: each block for itself, and the results of blocks added as a binary tree over the blocks'
  numbers. So the keys can be divided among threads: a task takes an aligned run of a power of two of blocks, a node of that
  tree (a *split* of the keys), and `merge` adds the splits.

Blocks are counted from key 0, whatever the window is.
"""

from __future__ import annotations

import numpy as np

from ......simd.compile import kernel
from ......simd.exponential import exp
from ......simd.lanes import LANES, load, store
from ......simd.memory import CACHE_LINE, address, fill, keep_alive, line_address, view
from ......simd.team import TaskKernel, call_part
from .block_panels import BLOCK, key_words, read_scales, value_words
from .block_products import add_values, multiply_keys, round_queries
from .block_tree import MAX_LEVELS, add_stack, push_node
from .byte_keys import BYTE_SCORES
from .cache_rows import TYPE_IDS, decode_columns, decode_rows
from .row_products import SCORES, VALUES
from .running_softmax import change_scores, clear, exponentiate, first_key, hide, round_up
from .shared_values import FIELDS, KEYS, UNIT, sum_squares
from .shared_values import ROWS as SHARED_ROWS
from .tiles import KEY_COLUMNS, KEY_ROWS, PANEL, ROWS, multiply_panels

# A job, int64: addresses, sizes in elements, steps in bytes, and two float64 by their bits.
JOB_FIELDS = (
    "tasks",  # address of int64 [parts, TASK_FIELDS]
    "q",  # float32 [n, heads, k_width]
    "k",  # of row 0 of key head 0
    "v",
    "out",  # float32 [n, heads, v_width]
    "split_values",  # float32 [splits, n, heads, padded v_width]: sums of exp(score - maximum) * value, if there are several
    "maxima",  # float32 [splits, n, heads]: the largest score
    "sums",  # float32 [splits, n, heads]: the sum of exp(score - maximum)
    "sinks",  # float32 [heads], or 0
    "slopes",  # float32 [heads], or 0: scores lose slope * distance
    "n",
    "group",  # queries per key head
    "kv_heads",
    "k_width",
    "v_width",
    "k_type",  # of TYPE_IDS, or WORDS, ROW_WORDS, BYTES (see `job_parts`)
    "v_type",
    "k_row_bytes",
    "v_row_bytes",
    "k_head_bytes",  # from one head's rows to the next
    "v_head_bytes",
    "past",  # tokens before the first query's
    "ahead",  # later tokens that a query sees, as far as there are any
    "window",  # keys up to the last one that a query sees; 0: all; -n: those of its chunk of n tokens
    "splits",
    "split_blocks",  # blocks of a split, a power of two; 0: sums in the order of prompts, and one split
    "first_split",  # the number of the first split: splits that all queries' windows are behind are left out
    "merge_heads",  # heads of a part of `merge`
    "query_part",  # what rounds the queries for the score_part, or 0
    "score_part",  # of rows that are multiplied in another way than `attend` does itself, or 0: see `job_parts`
    "value_part",
    "shared_part",  # address of the part that weighs shared values (see shared_values), or 0
    "shared_values",
    "shared_width",
    "shared_out",  # float32 [n, shared_heads, shared_width]: of the job's first head
    "shared_heads",  # 0: shared_out is float64 [tasks, shared_width], for the sums over a task's queries of the squares
    "gather_part",  # address of the part that brings rows from different places together (see listed_rows), or 0
    "gathered",  # its record; keys and values are the same rows then, at no address of their own
    "seen",  # uint8 [n, seen_step]: 0 for keys that a query does not see; address 0: only those after it
    "seen_step",
    "scale",
    "softcap",  # 0: none
)
(
    _TASKS, _Q, _K, _V, _OUT, _SPLIT_VALUES, _MAXIMA, _SUMS, _SINKS, _SLOPES, _N, _GROUP, _KV_HEADS, _K_WIDTH, _V_WIDTH,
    _K_TYPE, _V_TYPE, _K_ROW_BYTES, _V_ROW_BYTES, _K_HEAD_BYTES, _V_HEAD_BYTES, _PAST, _AHEAD, _WINDOW, _SPLITS,
    _SPLIT_BLOCKS, _FIRST_SPLIT, _MERGE_HEADS, _QUERY_PART, _SCORE_PART, _VALUE_PART,
    _SHARED_PART, _SHARED_VALUES, _SHARED_WIDTH, _SHARED_OUT, _SHARED_HEADS, _GATHER_PART, _GATHERED, _SEEN, _SEEN_STEP, _SCALE,
    _SOFTCAP,
) = range(len(JOB_FIELDS))  # fmt: skip
_JOB_SIZE = len(JOB_FIELDS)
# Key heads, queries of a group, tokens, blocks of keys: each from ... to; and the number of the split. Blocks may go beyond the
# last key that a query sees.
TASK_FIELDS = ("head", "head_end", "member", "member_end", "token", "token_end", "block", "block_end", "split")
_HEAD, _HEAD_END, _MEMBER, _MEMBER_END, _TOKEN, _TOKEN_END, _BLOCK, _BLOCK_END, _SPLIT = range(len(TASK_FIELDS))
_TASK_SIZE = len(TASK_FIELDS)

_F32, _FIRST_BLOCK_TYPE = TYPE_IDS["f32"], TYPE_IDS["q8_0"]
_PRODUCT_WORDS = max(operands.itemsize for operands in (SCORES, VALUES, BYTE_SCORES)) // 8
assert KEYS % PANEL == 0


@kernel
def _copy_queries(job, task, head, scale, out, width):
    """Writes the queries of a task times scale to out, rows of `width` numbers: zeros follow a query's own."""
    k_width, heads, row = job[_K_WIDTH], job[_KV_HEADS] * job[_GROUP], 0
    q = view(job[_Q], job[_N] * heads * k_width, np.float32)
    for token in range(task[_TOKEN], task[_TOKEN_END]):
        for member in range(task[_MEMBER], task[_MEMBER_END]):
            start = (token * heads + head * job[_GROUP] + member) * k_width
            for j in range(k_width):
                out[row + j] = q[start + j] * scale
            for j in range(k_width, width):
                out[row + j] = np.float32(0)
            row += width


@kernel
def _ahead(rows, nbytes, steps):
    """How the next block of rows is asked for: the first and the last of the cache lines that the steps of a product ask for,
    one each, and how many bytes on decoding asks, if these are too few (0: it does not).

    rows: address of this block; nbytes: of a block, 0: none is to be asked for."""
    if steps * CACHE_LINE < nbytes:
        return rows, rows, nbytes
    return rows + nbytes, rows + max(2 * nbytes - CACHE_LINE, 0), nbytes * 0


# --- results ----------------------------------------------------------------------------------------------------------


@kernel
def _normalisation(job, head, maximum, sum_):
    """What the sums of a query's weighted values are multiplied with; the head's sink, if it has one, takes part."""
    factor = np.float32(1)
    if job[_SINKS]:
        sink = view(job[_SINKS], head + 1, np.float32)[head]
        highest = max(sink, maximum)
        factor = exp(maximum - highest)
        sum_ = sum_ * factor + exp(sink - highest)
    return np.float32(0) if sum_ == 0 else factor / sum_


@kernel
def _write_results(job, task, head, maxima, sums, values, v_width, width):
    """Writes the results of a task's rows, `width` apart, to the job's arrays: the sums as they are where there are several
    splits, else divided. v_width: of a head's own values in a row, those behind them are shared ones. sums then holds what the
    rows were multiplied with."""
    heads, members = job[_KV_HEADS] * job[_GROUP], task[_MEMBER_END] - task[_MEMBER]
    own, split = job[_V_WIDTH], task[_SPLIT] * job[_N] * heads
    for r in range((task[_TOKEN_END] - task[_TOKEN]) * members):
        query_head, token = head * job[_GROUP] + task[_MEMBER] + r % members, task[_TOKEN] + r // members
        row = token * heads + query_head
        if job[_SPLITS] > 1:
            view(job[_MAXIMA] + 4 * (split + row), 1, np.float32)[0] = maxima[r]
            view(job[_SUMS] + 4 * (split + row), 1, np.float32)[0] = sums[r]
            padded = round_up(own, LANES)
            out = view(job[_SPLIT_VALUES] + 4 * (split + row) * padded, padded, np.float32)
            for j in range(0, padded, LANES):
                store(out, j, load(values, r * width + j))
            continue
        factor = _normalisation(job, query_head, maxima[r], sums[r])
        out = view(job[_OUT] + 4 * row * own, own, np.float32)
        for j in range(own):
            out[j] = values[r * width + j] * factor
        sums[r] = factor
        if job[_SHARED_HEADS]:
            place = token * job[_SHARED_HEADS] + query_head
            shared = view(job[_SHARED_OUT] + 4 * place * job[_SHARED_WIDTH], job[_SHARED_WIDTH], np.float32)
            for j in range(shared.size):
                shared[j] = values[r * width + v_width + j] * factor


@kernel
def set_addresses(job, tasks, q, out, split_values, rows):
    """Writes the addresses of arrays into a job; returns that of the job. rows: float32, room for maxima and sums.

    The same in Python takes a microsecond per array, in every layer of every token.
    """
    job[_TASKS], job[_Q], job[_OUT] = tasks.ctypes.data, q.ctypes.data, out.ctypes.data
    job[_SPLIT_VALUES], job[_MAXIMA] = split_values.ctypes.data, rows.ctypes.data
    job[_SUMS] = job[_MAXIMA] + 2 * rows.size
    return job.ctypes.data


def _attend(name: str, has_key_blocks: bool, has_value_blocks: bool) -> TaskKernel:
    """The function for caches of float types or of types in blocks: each is half of what there is to compile."""

    def attend(argument, number):
        """A task of a job: argument the job's address, number the task's."""
        job = view(argument, _JOB_SIZE, np.int64)
        task = view(job[_TASKS] + 8 * _TASK_SIZE * number, _TASK_SIZE, np.int64)
        real = view(argument, _JOB_SIZE, np.float64)
        scale, softcap, window = np.float32(real[_SCALE]), np.float32(real[_SOFTCAP]), job[_WINDOW]
        members, position, tokens = (
            task[_MEMBER_END] - task[_MEMBER],
            job[_PAST] + task[_TOKEN] + job[_AHEAD],
            task[_TOKEN_END] - task[_TOKEN],
        )
        rows, split_blocks = tokens * members, job[_SPLIT_BLOCKS]
        # Rows of types in blocks have full blocks; those of the others are filled up, here and in the cache.
        k_width, v_width = round_up(job[_K_WIDTH], BLOCK if has_key_blocks else LANES), round_up(job[_V_WIDTH], PANEL)
        v_decoded = round_up(job[_V_WIDTH], BLOCK if has_value_blocks else LANES)
        shared = round_up(job[_SHARED_WIDTH], UNIT) if job[_SHARED_PART] else 0
        width, padded_rows = v_width + shared, round_up(rows, SHARED_ROWS) if job[_SHARED_PART] else rows
        buffers = 1  # of sums: one, or as many as the stack of nodes may need and one for the block at hand
        while split_blocks >> buffers - 1:
            buffers += 1
        value_size = padded_rows * width
        is_rounded = job[_QUERY_PART] != 0 and job[_VALUE_PART] != 0  # keys and values to bf16
        # Latents are keys and values: their scales are read once.
        is_shared = has_value_blocks and job[_K] == job[_V] and job[_K_TYPE] == job[_V_TYPE]
        row_blocks, mark, widest = (k_width if is_shared else v_decoded) // BLOCK, np.float32(0), max(k_width, v_width)
        rounded = rows * (k_width // 2 + 1 if has_key_blocks else 0), rows * (KEYS + 2 if has_value_blocks else 0)
        sizes = (rows * k_width, rows * KEYS, buffers * value_size, KEYS * widest, LANES * widest, rounded[0], rounded[1])
        total = sizes[0] + sizes[1] + sizes[2] + sizes[3] + sizes[4] + sizes[5] + sizes[6]
        gathered = KEYS * k_width if job[_GATHER_PART] else 0
        scratch = np.empty(total + gathered + LANES, np.float32)
        queries_at = line_address(scratch)
        scores_at = queries_at + 4 * sizes[0]
        values_at = scores_at + 4 * sizes[1]
        decoded_at = values_at + 4 * sizes[2]
        scales_at, codes_at = decoded_at + 2 * sizes[3], decoded_at + 4 * sizes[3]  # of blocks, behind the words
        query_words = codes_at + 4 * sizes[4]
        query_factors, weight_words = query_words + 2 * rows * k_width, query_words + 4 * sizes[5]
        gathered_at = weight_words + 4 * sizes[6]
        scales = view(scales_at, sizes[3] // 2, np.float32)
        queries, scores = view(queries_at, sizes[0], np.float32), view(scores_at, sizes[1], np.float32)
        decoded = view(decoded_at, sizes[3], np.float32)
        results = np.empty(2 * buffers * rows, np.float32)
        maxima_at, value_step = address(results), 4 * value_size
        sums_at = maxima_at + 4 * buffers * rows
        stack = np.empty(2 * MAX_LEVELS, np.int64)
        nodes, levels = view(address(stack), MAX_LEVELS, np.int64), view(address(stack) + 8 * MAX_LEVELS, MAX_LEVELS, np.int64)
        for i in range(MAX_LEVELS):
            nodes[i] = i
        weighing, products = np.empty(len(FIELDS), np.int64), np.empty(_PRODUCT_WORDS, np.int64)
        last_end = min(task[_BLOCK_END] * KEYS, position + tokens, job[_PAST] + job[_N])
        for head in range(task[_HEAD], task[_HEAD_END]):
            _copy_queries(job, task, head, scale, queries, k_width)
            if has_key_blocks and job[_QUERY_PART]:
                products[0], products[1], products[2], products[3] = queries_at, query_words, rows, k_width
                call_part(job[_QUERY_PART], address(products), 0)
            elif job[_QUERY_PART]:
                products[0], products[2], products[6] = queries_at, rows, k_width
                call_part(job[_QUERY_PART], address(products), 0)
            elif has_key_blocks:
                round_queries(queries, rows, k_width, job[_K_TYPE], query_words, view(query_factors, rows, np.float32))
            key = task[_BLOCK] * KEYS
            if window:
                # Keys that no query of the task sees are left out. What is taken together (a block, or LANES keys) begins at a
                # multiple of its size all the same, or a query's sums would depend on the task's first query.
                unit = KEYS if split_blocks else LANES
                key = max(key, first_key(position, window) // unit * unit)
            depth = np.int64(0)
            clear(maxima_at, sums_at, rows, values_at, value_size)
            while key < last_end:
                block = key // KEYS
                count = min((block + 1) * KEYS, last_end) - key
                skipped = max(0, key - position) * members  # rows of the queries before these keys
                seen_keys = max(0, position - key) + 1  # of the block, by the first row behind them
                block_maxima, block_sums, block_values = maxima_at, sums_at, values_at
                if split_blocks:
                    block_maxima += 4 * depth * rows
                    block_sums += 4 * depth * rows
                    block_values += depth * value_step
                    clear(block_maxima, block_sums, rows, block_values, skipped * width)
                maxima, sums = view(block_maxima, rows, np.float32), view(block_sums, rows, np.float32)
                values = view(block_values, value_size, np.float32)
                k = job[_K] + head * job[_K_HEAD_BYTES] + key * job[_K_ROW_BYTES]
                v = job[_V] + head * job[_V_HEAD_BYTES] + key * job[_V_ROW_BYTES]
                if job[_GATHER_PART]:
                    products[0], products[1], products[2], products[3] = job[_GATHERED], key, count, gathered_at
                    call_part(job[_GATHER_PART], address(products), 0)
                    k, v = gathered_at, gathered_at
                panels, block_scores = round_up(count, PANEL) // PANEL, scores_at + 4 * KEYS * skipped
                tiles = (rows - skipped + ROWS - 1) // ROWS
                # Numbers of a key that are multiplied at a time: pairs of words or of bf16, four bytes.
                k_step = (2 if has_key_blocks else 1) * (2 if job[_QUERY_PART] else 1)
                k_steps = tiles * panels * (k_width // k_step)
                k_next, k_last, k_ahead = _ahead(k, KEYS * job[_K_ROW_BYTES], k_steps)
                if has_key_blocks and job[_SCORE_PART]:
                    products[1], products[2] = query_words + 2 * k_width * skipped, rows - skipped
                    products[4], products[5], products[6] = k, job[_K_ROW_BYTES], count
                    products[7], products[8] = block_scores, 4 * KEYS
                    products[9], products[10], products[11] = decoded_at, scales_at, codes_at
                    products[12], products[13], products[14] = k_ahead, k_next, k_last
                    products[15], products[16] = seen_keys, members
                    call_part(job[_SCORE_PART], address(products), 0)
                elif has_key_blocks:
                    key_words(job[_K_TYPE], k, job[_K_ROW_BYTES], count, k_width, decoded_at, codes_at, k_ahead)
                    mark = read_scales(job[_K_TYPE], k, job[_K_ROW_BYTES], count, k_width, scales_at, codes_at)
                    q_at, f_at, blocks = query_words + 2 * k_width * skipped, query_factors + 4 * skipped, k_width // BLOCK
                    multiply_keys(
                        q_at,
                        2 * k_width,
                        f_at,
                        rows - skipped,
                        decoded_at,
                        scales_at,
                        panels,
                        blocks,
                        block_scores,
                        4 * KEYS,
                        k_next,
                        k_last,
                        (seen_keys, members, KEY_COLUMNS),
                    )
                elif job[_SCORE_PART]:
                    q_step = (2 if job[_QUERY_PART] else 4) * k_width
                    products[0], products[1], products[2] = queries_at + q_step * skipped, q_step, rows - skipped
                    products[3], products[4], products[5], products[6] = k, job[_K_ROW_BYTES], count, k_width
                    products[7], products[8] = block_scores, 4 * KEYS
                    products[9] = k_ahead if job[_QUERY_PART] else KEYS * job[_K_ROW_BYTES]
                    products[10], products[11] = v, job[_V_ROW_BYTES] if job[_V] != job[_K] else 0
                    products[12], products[13], products[14] = decoded_at, k_next, k_last
                    products[15], products[16] = seen_keys, members
                    call_part(job[_SCORE_PART], address(products), 0)
                else:
                    # Products also run over what is behind the last key or number: what lay there may be subnormal, and slow.
                    if round_up(count, LANES) < panels * PANEL:
                        fill(view(decoded_at + 4 * (panels - 1) * k_width * PANEL, k_width * PANEL, np.float32), 0)
                    decode_columns(job[_K_TYPE], k, job[_K_ROW_BYTES], count, k_width, decoded_at, k_ahead)
                    q_at, every = queries_at + 4 * k_width * skipped, np.bool_(True)
                    multiply_panels(
                        *(q_at, 4 * k_width, rows - skipped, decoded_at, panels, k_width, block_scores, 4 * KEYS, every),
                        *(k_next, k_last, (seen_keys, members, KEY_COLUMNS)),
                    )
                scaled = 0 if split_blocks else width
                if softcap != 0 or job[_SLOPES]:
                    slopes_at = job[_SLOPES] + 4 * (head * job[_GROUP] + task[_MEMBER]) if job[_SLOPES] else 0
                    change_scores(scores, skipped, rows, members, position - job[_AHEAD] - key, count, softcap, slopes_at)
                if job[_SEEN]:
                    hide(
                        scores,
                        skipped,
                        rows,
                        members,
                        job[_SEEN] + task[_TOKEN] * job[_SEEN_STEP] + key,
                        job[_SEEN_STEP],
                        count,
                    )
                exponentiate(scores, skipped, rows, members, position, window, key, count, maxima, sums, values, scaled)
                panels, to, seen = v_width // PANEL, block_values + 4 * width * skipped, rows - skipped
                v_steps = tiles * panels * (count // 2 if has_value_blocks or is_rounded else count)
                v_next, v_last, v_ahead = _ahead(v, 0 if job[_K] == job[_V] else KEYS * job[_V_ROW_BYTES], v_steps)
                if has_value_blocks:
                    value_words(job[_V_TYPE], v, job[_V_ROW_BYTES], count, v_decoded, v_width, decoded_at, codes_at, v_ahead)
                    if not is_shared:
                        mark = read_scales(job[_V_TYPE], v, job[_V_ROW_BYTES], count, v_decoded, scales_at, codes_at)
                    weights = view(block_scores, seen * KEYS, np.float32)
                    add_values(
                        *(job[_V_TYPE], weights, seen, KEYS, count, decoded_at, scales, mark, v_decoded, row_blocks, panels),
                        *(weight_words, to, 4 * width, split_blocks > 0, v_next, v_last, (seen_keys, members, KEY_ROWS)),
                    )
                else:
                    # Panels that the part multiplies. Of values as they lie in the cache these are the whole ones: a last one
                    # that they do not fill is decoded, with zeros behind them.
                    in_rows = np.int64(0)
                    if job[_VALUE_PART]:
                        in_rows = panels if is_rounded else v_decoded // PANEL
                    if in_rows:
                        products[0], products[1], products[2] = block_scores, 4 * KEYS, seen
                        products[3], products[4], products[5], products[6] = v, job[_V_ROW_BYTES], in_rows, count
                        products[7], products[8], products[9], products[10] = to, 4 * width, v_decoded, decoded_at
                        products[11], products[12], products[13] = v_ahead, v_next, v_last
                        products[14], products[15], products[16] = seen_keys, members, np.int64(split_blocks > 0)
                        call_part(job[_VALUE_PART], address(products), 0)
                    v += PANEL * (4 if job[_V_TYPE] == _F32 else 2) * in_rows
                    panels, to, v_rest = panels - in_rows, to + 4 * PANEL * in_rows, v_decoded - PANEL * in_rows
                    if panels:
                        if v_decoded < v_width:
                            fill(view(decoded_at + 4 * (panels - 1) * count * PANEL, count * PANEL, np.float32), 0)
                        decode_rows(
                            *(job[_V_TYPE], v, job[_V_ROW_BYTES], count, v_rest, decoded, 0),
                            *(np.int64(PANEL), count * PANEL, v_ahead),
                        )
                        multiply_panels(
                            *(block_scores, 4 * KEYS, seen, decoded_at, panels, count, to, 4 * width, split_blocks > 0),
                            *(v_next, v_last, (seen_keys, members, KEY_ROWS)),
                        )
                if job[_SHARED_PART]:
                    weighing[0], weighing[1], weighing[2] = scores_at, block_values + 4 * v_width, 4 * width
                    weighing[3], weighing[4], weighing[5], weighing[6] = rows, skipped, key, count
                    weighing[7], weighing[8] = job[_SHARED_VALUES], shared
                    weighing[9], weighing[10] = position, members
                    call_part(job[_SHARED_PART], address(weighing), 0)
                if split_blocks:
                    leaf = block % split_blocks
                    depth = push_node(
                        leaf, depth, nodes, levels, rows, width, values_at, value_step, maxima_at, sums_at, 4 * rows
                    )
                key += count
            add_stack(depth, nodes, rows, width, values_at, value_step, maxima_at, sums_at, 4 * rows)
            maxima, sums = view(maxima_at, rows, np.float32), view(sums_at, rows, np.float32)
            _write_results(job, task, head, maxima, sums, view(values_at, value_size, np.float32), v_width, width)
            if job[_SHARED_PART] and not job[_SHARED_HEADS]:
                squares = view(job[_SHARED_OUT] + 8 * number * job[_SHARED_WIDTH], job[_SHARED_WIDTH], np.float64)
                sum_squares(values_at + 4 * v_width, 4 * width, rows, sums, squares)
        keep_alive(scratch)
        keep_alive(results)
        keep_alive(stack)
        keep_alive(products)

    attend.__qualname__ = name
    return TaskKernel(attend)


attend_floats, attend_blocks = _attend("attend_floats", False, False), _attend("attend_blocks", True, True)
attend_key_blocks, attend_value_blocks = _attend("attend_key_blocks", True, False), _attend("attend_value_blocks", False, True)
# By whether keys are in blocks, and whether values are.
ATTEND = {
    (False, False): attend_floats,
    (True, False): attend_key_blocks,
    (False, True): attend_value_blocks,
    (True, True): attend_blocks,
}


def attend_of(k_type: int, v_type: int) -> TaskKernel:
    """The function for keys and values of these types, as `k_type` and `v_type` of a job."""
    return ATTEND[k_type >= _FIRST_BLOCK_TYPE, v_type >= _FIRST_BLOCK_TYPE]


@TaskKernel
def merge(argument, number):
    """Adds the splits of a job for `merge_heads` heads of one token, part after part along the heads, and divides the sums."""
    job = view(argument, _JOB_SIZE, np.int64)
    heads, v_width, splits = job[_KV_HEADS] * job[_GROUP], job[_V_WIDTH], job[_SPLITS]
    width = round_up(v_width, LANES)
    per_token = (heads + job[_MERGE_HEADS] - 1) // job[_MERGE_HEADS]
    token, first = number // per_token, number % per_token * job[_MERGE_HEADS]
    rows, row, step = min(job[_MERGE_HEADS], heads - first), token * heads + first, 4 * job[_N] * heads
    values, maxima, sums = job[_SPLIT_VALUES] + 4 * row * width, job[_MAXIMA] + 4 * row, job[_SUMS] + 4 * row
    nodes, levels, depth = np.empty(MAX_LEVELS, np.int64), np.empty(MAX_LEVELS, np.int64), np.int64(0)
    for split in range(splits):
        nodes[depth] = split
        number_of_all = job[_FIRST_SPLIT] + split
        depth = push_node(number_of_all, depth, nodes, levels, rows, width, values, step * width, maxima, sums, step)
    add_stack(depth, nodes, rows, width, values, step * width, maxima, sums, step)
    total, out = view(values, rows * width, np.float32), view(job[_OUT] + 4 * row * v_width, rows * v_width, np.float32)
    row_maxima, row_sums = view(maxima, rows, np.float32), view(sums, rows, np.float32)
    for r in range(rows):
        factor = _normalisation(job, first + r, row_maxima[r], row_sums[r])
        for j in range(v_width):
            out[r * v_width + j] = total[r * width + j] * factor
