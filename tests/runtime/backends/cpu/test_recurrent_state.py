"""The recurrent state of a sequence: passes, checkpoints, going back, copies."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufmill.runtime.backends.cpu.kv_cache import KVCache
from ggufmill.runtime.backends.cpu.recurrent_state import RecurrentState
from ggufmill.runtime.cache_layout import CachePart, LayerCache, StatePart, state_offsets

SIZE = 64


def feed(state, tokens):
    """A pass over tokens: the state is a hash of all of them, in order."""
    assert state.addresses() == (state.current.memory.ctypes.data, state._next.ctypes.data)
    assert state._next is not None
    value = int(state.current.memory.view(np.int64)[0])
    for token in tokens:
        value = hash((value, token)) & (2**62 - 1)
    state._next.view(np.int64)[:] = value
    state.commit(len(tokens))


def value_of(tokens):
    state = RecurrentState(SIZE, 1)
    feed(state, tokens)
    return state.current.memory.tolist()


actions = st.lists(
    st.one_of(
        st.tuples(st.just("feed"), st.integers(1, 5)),
        st.tuples(st.just("fail"), st.just(0)),
        st.tuples(st.just("checkpoint"), st.just(0)),
        st.tuples(st.just("truncate"), st.integers(0, 20)),
        st.tuples(st.just("fork"), st.integers(0, 20)),
    ),
    max_size=30,
)


@settings(max_examples=100, deadline=None)
@given(actions, st.integers(1, 3))
def test_a_state_is_always_that_of_its_tokens(steps, limit):
    sequences = [(RecurrentState(SIZE, limit), [])]
    for counter, (step, number) in enumerate(steps):
        state, tokens = sequences[counter % len(sequences)]
        if step == "feed":
            new = [counter * 10 + i for i in range(number)]
            before = len(tokens)
            feed(state, new)
            tokens += new
            assert state.resumable(before) == before  # the state before the last pass is there
        elif step == "fail":
            state.addresses()
            assert state._next is not None
            state._next[:] = 255
        elif step == "checkpoint":
            state.checkpoint()
            assert len(state._checkpoints) <= limit
            assert state.resumable(len(tokens)) == len(tokens)
        elif step == "truncate":
            expected = state.resumable(number)
            assert expected <= min(number, len(tokens))
            assert state.truncate(number) == (expected if number < len(tokens) else len(tokens))
            del tokens[state.current.length :]
        else:
            copy = state.fork(number)
            sequences.append((copy, tokens[: copy.current.length]))
        for state, tokens in sequences:
            assert state.current.length == len(tokens)
            if tokens:
                assert state.current.memory.tolist() == value_of(tokens)
            else:
                assert not state.current.memory.any()


def test_checkpoints_that_are_close_to_others_go_first():
    state = RecurrentState(SIZE, 3)
    for count in (100, 100, 5, 100, 200):
        feed(state, range(count))
        state.checkpoint()
    feed(state, range(300))
    feed(state, range(10))
    assert [state.resumable(n) for n in (99, 100, 204, 304, 305, 504, 505, 805, 900)] == [0, 0, 0, 205, 305, 305, 505, 805, 815]


def test_a_cache_with_rows_and_states():
    layers = [LayerCache({}, {"delta": StatePart((2, 3, 5))}), LayerCache({"k": CachePart(1, 4), "v": CachePart(2, 4)})]
    assert layers[0].state_bytes == 4 * 2 * 3 * 16
    assert state_offsets(layers) == ({(0, "delta"): 0}, 384)
    cache = KVCache(layers, 50, 2)
    assert (cache.names, cache.types, cache.token_bytes) == (("k", "v"), "f32 and f32", 3 * 64)

    def value(cache):
        return cache.state.current.memory.view(np.int32)[0]

    def run(n):
        table, state = cache.table(n), cache.state
        assert table.shape == (2, 2, 3)
        assert not table[0].any()
        assert table[1].all()
        assert state is not None
        state.addresses()
        assert state._next is not None
        state._next.view(np.int32)[:] = cache.length + n
        for name in cache.names:
            rows = np.full((n, cache.layers[1].rows[name].heads, 4), cache.length, np.float32)
            cache.put(1, name, rows)
        cache.commit(n)

    for n in (10, 5, 1):
        run(n)
        cache.checkpoint()
    run(3)
    run(1)
    assert [cache.resumable(n) for n in (9, 14, 15, 16, 18, 19, 20, 99)] == [0, 10, 10, 16, 16, 19, 20, 20]
    fork = cache.fork(17)
    assert (fork.length, cache.length) == (16, 20)
    assert fork.read(1, "k").ravel().tolist() == [0] * 40 + [10] * 20 + [15] * 4
    cache.truncate(18)
    assert (cache.length, value(cache)) == (16, 16)
    cache.truncate(3)
    assert (cache.length, value(cache)) == (0, 0)
    assert (fork.length, value(fork)) == (16, 16)
    assert fork.nbytes >= 3 * 384
