"""What a user, a damaged file or an interruption may do to a running model: a clear error, and a model that still works."""

import dataclasses
import gc
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from ggufmill.convert import open_source
from ggufmill.formats import TYPES, MillError, PlanError, SourceTensor, TensorSource
from ggufmill.jobs.execute import execute
from ggufmill.quantize import decode, encode
from ggufmill.quantize.planning import plan_quantize
from ggufmill.recipes import FOLDER
from ggufmill.runtime import load_model
from ggufmill.runtime.backends.cpu.weights import WeightStore
from ggufmill.runtime.graph import Observer
from ggufmill.simd.instructions import amx
from ggufmill.simd.workers import Workers


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("threads", "2", "threads has to be a whole number, not '2'"),
        ("threads", True, "threads has to be a whole number"),
        ("threads", 100_000, "threads"),
        ("n_ctx", 1.5, "n_ctx has to be a whole number"),
        ("cache_bytes", -1, "cache_bytes has to be"),
        ("batch", None, "batch has to be a whole number"),
        ("mla", True, "mla"),
        ("cache_k", 5, "cache_k has to be the name of a type"),
        ("exact", "no", "exact has to be True or False"),
        ("expert_reduction", (1,), "expert_reduction has to be"),
        ("expert_reduction", 3, "expert_reduction has to be"),
        ("expert_reduction", (1.5, 0.5), "expert_reduction has to be"),
    ],
)
def test_settings_of_the_wrong_kind_are_named(tiny, setting, value, message):
    with pytest.raises(PlanError) as error:
        load_model(tiny, **{setting: value})
    assert message in str(error.value)


@pytest.mark.parametrize("tokens", [[1.7], "abc", [[1, 2]], [True, None], [2**70]])
def test_tokens_that_are_none(tiny, tokens):
    with pytest.raises(PlanError, match="tokens have to be"):
        load_model(tiny).session().feed(tokens)


def test_places_outside_of_a_session(tiny):
    model = load_model(tiny)
    with pytest.raises(PlanError, match="n_ctx"):
        model.session(0)
    session = model.session(50)
    session.feed(range(20))
    for call in (session.rewind, session.fork):
        with pytest.raises(PlanError, match="-3"):
            call(-3)
    session.rewind(99)
    assert (len(session.tokens), session.cache.length) == (20, 20)
    assert session.fork(99).tokens == session.tokens


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError])
def test_an_interrupted_prompt_leaves_a_session_as_it_was(tiny, failure):
    model = load_model(tiny, ubatch=8)
    session = model.session()
    session.feed(range(5))
    expected = session.fork().feed(range(20))
    passes = []

    class Interrupt(Observer):
        def wants_output(self, op):
            return op.out == model.graph.layers[0]

        def on_output(self, op, out):
            passes.append(len(out))
            if len(passes) == 2:
                raise failure("now")

    with model.observing(Interrupt()), pytest.raises(failure):
        session.feed(range(20))
    assert passes == [8, 8]
    assert (len(session.tokens), session.cache.length) == (5, 5)
    assert np.array_equal(session.feed(range(20)), expected)


def test_an_interruption_at_the_end_of_a_pass_leaves_a_session_as_it_was(tiny, monkeypatch):
    model = load_model(tiny)
    session = model.session()
    session.feed(range(5))
    expected = session.fork().feed([7, 8])

    def interrupt(hidden, generated):
        raise KeyboardInterrupt

    for use in (session.feed, lambda tokens: session.fork().feed(tokens)):
        monkeypatch.setattr(model, "head", interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.feed([1, 2, 3])
        monkeypatch.undo()
        assert session.tokens == list(range(5))
        assert np.array_equal(use([7, 8]), expected)
        session.rewind(5)


def mixture(n=32, **keys):
    """A llama with 8 experts, 2 of them used, and other metadata; n: the size of embeddings."""
    draw, n_ff, experts = np.random.default_rng(0), 32, 8
    shapes = {"token_embd": (n, 64), "output": (n, 64), "output_norm": (n,)}
    for part, rows in (("q", n), ("k", n), ("v", n), ("output", n)):
        shapes[f"blk.0.attn_{part}"] = (n, rows)
    shapes |= {"blk.0.attn_norm": (n,), "blk.0.ffn_norm": (n,), "blk.0.ffn_gate_inp": (n, experts)}
    shapes |= {"blk.0.ffn_gate_exps": (n, n_ff, experts), "blk.0.ffn_up_exps": (n, n_ff, experts)}
    shapes["blk.0.ffn_down_exps"] = (n_ff, n, experts)
    tensors = {}
    for name, shape in shapes.items():
        rows = draw.standard_normal((int(np.prod(shape[1:])), shape[0])).astype(np.float32)
        tensors[f"{name}.weight"] = SourceTensor(f"{name}.weight", shape, "f32", lambda a, b, rows=rows: rows[a:b])
    values = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": n,
        "feed_forward_length": n_ff,
        "expert_count": experts,
    }
    values |= {"expert_used_count": 2, "attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5} | keys
    metadata = {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in values.items()}
    return TensorSource("test model", metadata, tensors, "")


@pytest.mark.parametrize(
    "keys",
    [
        {"expert_used_count": 0},
        {"expert_used_count": 9},
        {"expert_used_count": -1},
        {"expert_group_count": 3},
        {"expert_group_count": 4, "expert_group_used_count": 5},
        {"expert_group_count": -2},
        {"expert_group_count": 8, "expert_group_used_count": 1},  # 1 expert to choose from, 2 wanted
        {"attention.head_count": 0},
        {"attention.head_count_kv": 3},
        {"attention.head_count": float("inf")},
        {"attention.head_count_kv": 0},
        {"block_count": -1},
        {"context_length": 0},
        {"rope.dimension_count": 7},
        {"rope.dimension_count": 64},
        {"rope.dimension_count": -2},
        {"attention.sliding_window": -5},
    ],
)
def test_numbers_that_no_model_can_have(keys):
    assert np.isfinite(load_model(mixture()).logits([1, 2, 3])).all()
    with pytest.raises(MillError) as error:
        load_model(mixture(**keys)).logits([1, 2, 3])
    assert "\n" not in str(error.value)


def test_a_cut_file_is_noticed_before_it_is_read(tmp_path, tiny):
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(10_000))
    model = load_model(dataclasses.replace(tiny, files=[path]))
    session = model.session()
    session.feed([1, 2])
    model.files.wait = 0.0  # between two looks
    with path.open("r+b") as file:  # held open, as a mapped one is
        file.truncate(5_000)
        with pytest.raises(MillError, match=r"model\.gguf.*shorter"):
            session.feed([3])
        assert session.tokens == [1, 2]
        path.unlink()  # what is mapped stays readable, whatever now has its name
        session.feed([3])
        path.write_bytes(b"other")
        session.feed([4])


_CUT = """
import os, sys
from ggufmill.runtime import load_model
model = load_model(sys.argv[1])
model.files.wait = 1e9  # between two looks: the cut is met by a read
model.logits([1, 2, 3])
os.truncate(sys.argv[1], os.path.getsize(sys.argv[1]) // 2)
model.logits([1, 2, 3])
"""


def test_a_read_of_what_is_gone_ends_in_one_line(tmp_path):
    path = tmp_path / "model.gguf"
    execute(plan_quantize(open_source(FOLDER / "demo"), path, type=TYPES["q8_0"], pure=True))
    done = subprocess.run([sys.executable, "-c", _CUT, path], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "a model file was cut short" in done.stderr.splitlines()[-1]


def test_bytes_that_lie_nowhere_are_read_once_for_all_threads():
    data, reads = np.zeros((64, 34), np.uint8), []

    def raw(start, stop):
        reads.append(start)
        time.sleep(0.01)
        return data[start:stop].copy()

    tensor = SourceTensor("w", (32, 64), "q8_0", lambda a, b: np.zeros((b - a, 32), np.float32), raw, TYPES["q8_0"])
    store, found = WeightStore(TensorSource("", {}, {"w": tensor}, ""), 1 << 20), []
    callers = [threading.Thread(target=lambda: found.append(store.stored_bytes(tensor))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(20)
    assert reads == [0]
    assert all(each is found[0] for each in found)
    assert store.free == (1 << 20) - data.nbytes


def test_garbage_collected_within_the_lock_of_its_own_threads():
    """A collection may end the workers at any place, also where their lock is held."""
    workers = Workers(2)
    workers.ready()
    helpers = workers._helpers
    done = threading.Event()

    def end():
        with helpers._lock:
            helpers.stop()
        done.set()

    threading.Thread(target=end, daemon=True).start()
    assert done.wait(20)


def test_threads_that_cannot_be_started_are_done_without(monkeypatch):
    start, started = threading.Thread.start, []

    def few(thread):
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", few)
    workers = Workers(6)
    assert workers.map(lambda i: i + 1, range(20)) == list(range(1, 21))
    assert len(workers._helpers._threads) == 2
    monkeypatch.undo()
    del workers
    gc.collect()
    for thread in started:
        thread.join(120)
        assert not thread.is_alive()


def test_idle_threads_cost_nothing(tiny):
    model = load_model(tiny, threads=4)
    model.logits(range(40))
    time.sleep(0.05)
    before = model.workers.processor_seconds()  # not of the process: threads of other tests may still be ending
    time.sleep(0.3)
    assert model.workers.processor_seconds() - before < 0.1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_an_interpreter_ends_while_a_model_is_in_use():
    code = (
        "import threading, numpy as np\n"
        "from ggufmill.simd.workers import Workers\n"
        "from ggufmill.runtime.backends.cpu.kernels import elementwise\n"
        "workers = Workers(3)\n"
        "x = np.ones((64, 4096), np.float32)\n"
        "def work():\n"
        "    while True:\n"
        "        elementwise.gated(workers.ready(), elementwise.gate_part.address, 0, x, x, 1.0)\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "workers.map(lambda i: i, range(9))\n"
        "print('done')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr


def broken(source, name, type_name, bits):
    """The source with a tensor stored in a type, of whose bytes 0 and 1 (the scale of row 0's first block) are given."""
    tensor, kind = source.tensors[name], TYPES[type_name]
    data = encode(tensor.read(0, tensor.n_rows), type_name)
    at = kind.block_bytes - 2 if type_name == "q6_K" else 0
    data[0, at : at + 2] = np.array([bits], np.uint16).view(np.uint8)

    def read(start, stop):
        return decode(data[start:stop], type_name, tensor.shape[0])

    changed = SourceTensor(name, tensor.shape, type_name, read, lambda a, b: data[a:b], kind, mapped=data)
    return dataclasses.replace(source, tensors=source.tensors | {name: changed})


@pytest.mark.parametrize("type_name", ["q8_0", "q4_K", "q6_K", "iq4_xs", "iq3_xxs", "bf16"])
@pytest.mark.parametrize("bits", [0x7E00, 0xFE00, 0x7FFF, 0xFFFF])
@pytest.mark.parametrize("tiles", [True, False])
def test_no_nan_of_the_weights_gets_lost(wide, monkeypatch, type_name, bits, tiles):
    if tiles and not amx.permitted():
        pytest.skip("this processor has no bf16 tiles")
    if type_name == "bf16" and bits & 0x7FFF < 0x7F81:
        bits |= 0x7FC0
    monkeypatch.setattr(amx, "permitted", lambda: tiles)
    model = load_model(broken(wide, "output.weight", type_name, bits))
    for n in (1, 3, 40):  # one token, a few, many: products of three kinds
        logits = model.logits(np.arange(n))
        assert np.isnan(logits[:, 0]).all()
        assert np.isfinite(logits[:, 1:]).all()


@pytest.fixture(scope="module")
def wide():
    """A mixture whose output has rows of 256 numbers."""
    return mixture(256)


@pytest.mark.parametrize("part", ["k", "v"])
def test_keys_and_values_beyond_the_range_of_f16_are_blamed_on_the_cache(wide, part):
    tensor = wide.tensors[f"blk.0.attn_{part}.weight"]
    large = tensor.read(0, tensor.n_rows) * np.float32(1e5)
    changed = dataclasses.replace(tensor, read=lambda a, b: large[a:b])
    source = dataclasses.replace(wide, tensors=wide.tensors | {tensor.name: changed})
    assert np.isfinite(load_model(source, cache_k="bf16", cache_v="bf16").logits([1, 2, 3])).all()
    model = load_model(source)
    assert not np.isfinite(model.logits([1, 2, 3])).all()
    assert "attention of layer 0 over keys and values kept as f16 and f16" in str(model.explain_nonfinite([1, 2, 3]))


def test_a_model_says_what_it_is(tiny):
    model = load_model(tiny)
    assert repr(model) == "<Model test model: llama, 1 layers, vocabulary of 258>"
