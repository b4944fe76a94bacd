"""Keys and values that are rotated before they are cached: the same attention, with smaller errors where they are quantised."""

import numpy as np
import pytest
from op_graphs import DEVICE
from recorded_models import LATENT, kept_cases, record_of
from small_models import latent, llama

from ggufmill.errors import PlanError
from ggufmill.runtime import Settings, load_model
from ggufmill.runtime.backends import reference
from ggufmill.runtime.cache_layout import entry_parts, grouped_parts, latent_parts, rows_text, types_text
from ggufmill.runtime.models.architectures import build_graph
from ggufmill.runtime.placement.compute_buffers import Use
from ggufmill.runtime.placement.memory import cache_token_bytes

ROTATED = {"k_cache_hadamard": True, "v_cache_hadamard": True}
FLOATS = {"cache_k": "f32", "cache_v": "f32", "exact": True}
KINDS = ["llama", "v3", "deepseek4", "gpt-oss", "gemma4", "minimax-m3-odd", "kimi-linear", "mpt-clip", "bert"]
RUNS = [(case, mla) for case in kept_cases() for mla in ((0, 1, 2, 3) if case in LATENT else (None,))]


def rotations(model):
    """Of the rows of the cache that a user chooses a type for."""
    layers = model.new_cache(4).layers
    return [part.rotation for layer in layers for name, part in layer.rows.items() if name != "index_k"]


@pytest.mark.slow(keep=[f"{case}-*" for case in KINDS])
@pytest.mark.parametrize(("case", "mla"), RUNS)
def test_float_caches_give_the_logits_of_the_reference_backend(build, case, mla):
    """With every architecture; in one pass, in pieces and token by token."""
    source, tokens = build(case), record_of(case).tokens
    mode = {} if mla is None else {"mla": mla}
    model = load_model(source, threads=2, **FLOATS, **ROTATED, **mode)
    executable = reference.compile_graph(build_graph(source), source)
    expected = executable.hidden(tokens, [(executable.new_cache(len(tokens)), len(tokens))])
    tolerance = 1e-3 * expected.std()
    (whole,) = model.hidden([(model.new_cache(len(tokens)), tokens)])
    assert np.abs(whole - expected).max() < tolerance
    assert all(rotations(model))
    if not model.graph.is_causal:
        return
    cache = model.new_cache(len(tokens))
    found = [model.hidden([(cache, part)])[0] for part in np.split(tokens, [30, 70])]
    assert np.abs(np.concatenate(found) - expected).max() < tolerance
    cache.truncate(cache.resumable(70))
    rest = tokens[cache.length : cache.length + 12]
    found = [model.hidden([(cache, rest[i : i + 1])], generated=True)[0] for i in range(len(rest))]
    start = cache.length - len(rest)
    assert np.abs(np.concatenate(found) - expected[start : cache.length]).max() < tolerance


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("device", [None, DEVICE])
@pytest.mark.parametrize("case", ["llama", "v3-0", "v3-1", "v3-3"])
def test_every_backend_and_way_of_attention(build, case, device, flash):
    if device is not None:
        pytest.importorskip("torch")
        if not flash:
            return  # of the cpu backend alone
    name, _, mla = case.partition("-")
    settings = {"threads": 1, **FLOATS, **({"mla": int(mla)} if mla else {})}
    tokens = record_of(name).tokens
    expected = load_model(build(name), **settings).logits(tokens)
    model = load_model(build(name), **settings, **ROTATED, flash=flash, **({} if device is None else {"device": device}))
    session = model.session()
    found = [session.feed(part) for part in np.split(tokens, [30, 31, 60])]
    assert np.abs(found - expected[[29, 30, 59, len(tokens) - 1]]).max() < 1e-3 * expected.std()


WIDTHS = {
    **{f"head of {width}": (lambda width=width: llama(width=width)) for width in (16, 40, 64, 96, 128, 256, 512)},
    **{f"latent of {rank}": (lambda rank=rank: latent(rank)) for rank in (96, 128, 256, 512)},
}


@pytest.mark.parametrize("settings", [{"flash": True}, {"flash": False}, {"device": DEVICE}], ids=["flash", "plain", "torch"])
@pytest.mark.parametrize("case", list(WIDTHS))
def test_rotation_is_undone_at_every_width(tokens, case, settings):
    """A prompt in pieces, and tokens after it."""
    if "device" in settings:
        pytest.importorskip("torch")
    source, found = WIDTHS[case](), {}
    for rotated in ({}, ROTATED if case.startswith("head") else {"k_cache_hadamard": True}):
        model = load_model(source, threads=1, **FLOATS, **settings, **rotated)
        session = model.session()
        parts = [session.feed(part) for part in np.split(tokens[:40], [20, 37, 38, 39])]
        found[bool(rotated)] = np.array(parts)
    assert "device" in settings or all(rotations(model))
    assert np.abs(found[True] - found[False]).max() < 2e-5 * found[False].std()


@pytest.mark.parametrize("device", [None, DEVICE])
@pytest.mark.parametrize("case", [case for case in WIDTHS if case not in ("head of 16", "head of 40")])  # no blocks of 32
def test_quantised_rows_lose_little_at_every_width(tokens, case, device):
    """Queries and results are rotated as the rows are: else nothing would be near."""
    if device is not None:
        pytest.importorskip("torch")
    source, where = WIDTHS[case](), {} if device is None else {"device": device}
    expected = load_model(source, **FLOATS).logits(tokens)
    logits = load_model(source, exact=True, cache_k="q8_0", cache_v="q8_0", **where).logits(tokens)
    assert np.sqrt(np.mean((logits - expected) ** 2)) < 0.02 * expected.std()


def with_outliers(source):
    """The same model with one number of each head's keys that is 30 times as large, and its query that much smaller."""
    rows = slice(3, None, 32)
    for name, tensor in source.tensors.items():
        factor = 30 if "attn_k." in name else 1 / 30 if "attn_q." in name else 0
        if factor:
            data = np.array(tensor.read(0, tensor.n_rows))
            data[rows] *= factor
            object.__setattr__(tensor, "read", lambda start, stop, data=data: data[start:stop])
            object.__setattr__(tensor, "raw", None)
            object.__setattr__(tensor, "stored", None)
    return source


@pytest.mark.parametrize("type_name", ["q8_0", "q6_0", "q5_0", "q4_0", "iq4_nl", "q8_KV"])
def test_large_numbers_cost_less_precision(tokens, type_name):
    """Without rotary embedding, so that the queries can make up for them."""
    source = llama()
    source.metadata["llama.rope.dimension_count"] = 2
    source = with_outliers(source)
    expected = load_model(source, **FLOATS).logits(tokens)

    def error(**settings):
        logits = load_model(source, exact=True, cache_k=type_name, cache_v="f32", **settings).logits(tokens)
        return np.sqrt(np.mean((logits - expected) ** 2))

    assert error() < 0.6 * error(k_cache_hadamard=False)
    assert error() == error(k_cache_hadamard=True)  # it is the default


@pytest.mark.parametrize(
    ("settings", "rotated"),
    [
        ({}, (False, False)),
        ({"cache_k": "q8_0"}, (True, False)),
        ({"cache_v": "Q4_0"}, (False, True)),
        ({"cache_k": "q8_0", "cache_v": "q8_KV", "k_cache_hadamard": False}, (False, True)),
        ({"cache_k": "bf16", "k_cache_hadamard": True}, (True, False)),
    ],
)
def test_quantised_rows_are_rotated_by_default(settings, rotated):
    parts = grouped_parts(2, 64, 64, Settings(**settings))
    assert (bool(parts["k"].rotation), bool(parts["v"].rotation)) == rotated


@pytest.mark.parametrize(
    ("width", "rotation"), [(64, (64,)), (96, (32, 32, 32)), (128, (128,)), (192, (64,) * 3), (512, (512,)), (576, (64,) * 9)]
)
def test_blocks_are_the_largest_powers_of_two(width, rotation):
    settings = Settings(cache_k="q8_0", cache_v="q8_0")
    assert grouped_parts(1, width, width, settings)["k"].rotation == rotation
    assert entry_parts(width, 4, Settings(cache_k="q8_0"))["entries"].rotation == rotation


def test_latents_and_their_rotated_keys_are_rotated_apart():
    parts = latent_parts(16, 192, 128, 512, 64, Settings(cache_k="q8_0", cache_v="q8_0", mla=1))
    assert parts["kv"].rotation == (512, 64)
    assert parts["v"].rotation == (512,)


def test_a_rotation_of_values_that_are_not_cached_is_refused():
    with pytest.raises(PlanError, match="-no-vhad has no effect: with -mla 3 only latents are cached, rotated .-khad."):
        latent_parts(16, 192, 128, 512, 64, Settings(cache_k="q8_0", v_cache_hadamard=False))
    with pytest.raises(PlanError, match="-vhad has no effect: .* its values, which are cached, without rotation"):
        entry_parts(512, 4, Settings(v_cache_hadamard=True))


# --- types by layer ---------------------------------------------------------------------------------------------------


def test_types_of_the_first_and_the_last_layers(tokens):
    model = load_model(
        llama(), cache_k="q4_0", cache_v="bf16", cache_k_first=("q8_0", 1), cache_v_last=["Q5_0", 1], v_cache_hadamard=False
    )
    layers = model.new_cache(8).layers
    assert [(layer.rows["k"].type, layer.rows["v"].type) for layer in layers] == [("q8_0", "bf16"), ("q4_0", "q5_0")]
    assert types_text(layers) == "q8_0 or q4_0 and bf16 or q5_0"
    assert rows_text(layers) == "0.k q8_0 32; 0.v bf16; 1.k q4_0 32; 1.v q5_0"
    assert np.isfinite(model.logits(tokens)).all()
    both = Settings(cache_k_first=("q8_0", 3), cache_k_last=("q4_0", 2))
    assert [both.of_layer(i, 4).cache_k for i in range(4)] == ["q8_0", "q8_0", "q4_0", "q4_0"]


@pytest.mark.parametrize("make", [llama, latent])
def test_memory_is_planned_by_layer(make):
    source, settings = make(), {"cache_k": "q4_0", "cache_k_first": ("q8_0", 1), "cache_k_last": ("f16", 1)}
    cache = load_model(source, **settings).new_cache(8)
    planned = [cache_token_bytes(source.metadata, Use(512, **settings), layer) for layer in range(2)]
    assert planned == [layer.token_bytes for layer in cache.layers]
    assert len(set(planned)) == 2


def test_layers_on_a_host_have_the_types_of_the_whole_model(build, tokens):
    pytest.importorskip("torch")
    source = llama()
    settings = {"exact": True, "threads": 1, "cache_k": "f32", "cache_v": "f32", "cache_k_last": ("q8_0", 1)}
    model = load_model(source, **settings, device=DEVICE, gpu_layers=1)
    types = [host.types for host in model.new_cache(8).hosts]
    expected = load_model(source, **settings)
    assert expected.new_cache(8).types == "f32 or q8_0 and f32"
    assert np.abs(model.logits(tokens) - expected.logits(tokens)).max() < 0.05
    assert types == [] or all("q8_0" not in each for each in types)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache_k_first": "q8_0"}, r"cache_k_first has to be a type and a number of layers, such as \('q8_0', 2\)"),
        ({"cache_k_last": ("q8_0", 0)}, "cache_k_last has to be a type and a number of layers"),
        ({"cache_k_last": ("q9", 1)}, "-ctk q9: no type for a cache"),
        ({"cache_v_first": ("q8_0", 1), "flash": False}, r"quantised values \(-ctv-first q8_0\) need flash attention"),
        ({"k_cache_hadamard": 1}, "k_cache_hadamard has to be True, False or None"),
    ],
)
def test_what_does_not_go_is_said(settings, message):
    with pytest.raises(PlanError, match=message):
        load_model(llama(), **settings)
