"""Damage that gets past the first check: a file is taken apart, one value in it changed, and put together again.

Bytes changed at random seldom leave JSON whole, and never the checksums of a zip. `damaged` knows the shapes of files that
targets name; every result follows from the seed of `draw`.
"""

import io
import json
import random
import struct
import tomllib
import zipfile

import numpy as np

from ggufmill.formats import open_gguf
from ggufmill.formats.gguf_header import header_bytes
from ggufmill.formats.types import TYPES

LEAVES = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 31, 32, 255, 1 << 31, (1 << 31) - 1, -(1 << 31), 1 << 32, 1 << 53),
    *((1 << 63) - 1, 1 << 63, 1 << 64, 10**40, 10**4000),
    *(0.0, -0.0, 0.5, -1.5, 1e-40, 3.4e38, 1e308, float("inf"), float("-inf"), float("nan")),
    *("", " ", ".", "..", "../x", "/etc/passwd", "a/b", "\0", "\n", "\u2028", "\ud800", "\udc80", "é", "0", "1", "-1", "1e999"),
    *("x" * 300, "{{ x", "%s", "a" * 40 + "!", "(a+)+$", "[0-9]+", "\\", [], {}, [[]], [{}], [None], {"": None}, [0], ["a"]),
)
NUMBERS = (
    *(np.uint8(0), np.int8(-1), np.uint32(0), np.uint32(1), np.uint32(3), np.uint32(0xFFFFFFFF), np.int32(-1)),
    *(
        np.int64(-1),
        np.uint64((1 << 64) - 1),
        np.int64(1 << 40),
        np.float32(0),
        np.float32(-1),
        np.float32("nan"),
        np.float32("inf"),
    ),
    *(
        np.float64(1e300),
        np.float64("nan"),
        True,
        False,
        "",
        "x",
        "\udc80",
        [],
        ["a"],
        ["a", "a"],
        np.arange(0, dtype=np.int32),
    ),
    *(np.arange(3, dtype=np.uint8), np.array([True]), np.array([-1], np.int64), np.array([np.nan], np.float32)),
)


def damaged(shape: str, data: bytes, draw: random.Random, words: tuple[str, ...] = ()) -> bytes:
    """The file with one to four changes. shape: of SHAPES, or '' for bytes; words: that the parser knows. A file that is not
    of its shape (any more) is damaged as bytes."""
    try:
        changed = SHAPES[shape](data, draw, words)
    except Exception:
        return _bytes(data, draw, words)
    return _bytes(changed, draw, words) if draw.random() < 0.05 else changed


def _bytes(data: bytes, draw: random.Random, words: tuple[str, ...]) -> bytes:
    out = bytearray(data)
    for _ in range(1 << draw.randrange(4)):
        at, n = draw.randrange(len(out) + 1), draw.randrange(1, 1 << draw.randrange(1, 8))
        new = (draw.randbytes(n), b"\xff" * n, bytes(n), bytes(out[:n]), bytes(out[at : at + n]) * 3, b"")
        word = draw.choice(words).encode("utf-8", "surrogatepass") if words else b""
        out[at : at + draw.choice((0, n))] = draw.choice((*new, word))
    return bytes(out)


def tree(value, draw: random.Random, words: tuple[str, ...] = ()):
    """A JSON value with a change in one to four places."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        value = _changed(value, draw, words)
    return value


def _leaf(draw: random.Random, words: tuple[str, ...]):
    return draw.choice(words) if words and draw.random() < 0.2 else draw.choice(LEAVES)


def _changed(value, draw: random.Random, words: tuple[str, ...]):
    inside = isinstance(value, (dict, list)) and len(value) > 0
    if inside and draw.random() < 0.85:
        copy = value.copy()
        keys = list(copy) if isinstance(copy, dict) else range(len(copy))
        key = draw.choice(keys)
        match draw.randrange(8):
            case 0:
                del copy[key]
            case 1 if isinstance(copy, dict):
                copy[draw.choice((*words, *keys, "")) if draw.random() < 0.9 else "x" * 70] = copy[draw.choice(keys)]
            case 1:
                copy.insert(key, copy[draw.choice(keys)])
            case 2:
                copy[key] = copy[draw.choice(keys)]
            case _:
                copy[key] = _changed(copy[key], draw, words)
        return copy
    match draw.randrange(8):
        case 0:
            return [value]
        case 1:
            return {draw.choice(words) if words else "a": value}
        case 2 | 3 if isinstance(value, str) and value:
            at = draw.randrange(len(value))
            return value[:at] + str(_leaf(draw, words)) + value[at + draw.randrange(2) :]
        case 2 | 3 if isinstance(value, int):
            near = (-value, value + 1, value - 1, value * 2, value << 32)
            return draw.choice((*near, float(value % (1 << 53)), str(value % 997)))
        case 4 if isinstance(value, list) and value:
            return value * draw.randrange(2, 20)
        case _:
            return _leaf(draw, words)


def _dumped(value, draw: random.Random) -> bytes:
    return json.dumps(value, ensure_ascii=draw.random() < 0.9).encode("utf-8", "surrogatepass")


def _json(data: bytes, draw: random.Random, words: tuple[str, ...]) -> bytes:
    return _dumped(tree(json.loads(data), draw, words), draw)


def _lines(data: bytes, draw: random.Random, words: tuple[str, ...]) -> bytes:
    """JSON line by line; what is no JSON stays."""
    lines = data.split(b"\n")
    at = draw.randrange(len(lines))
    match draw.randrange(6):
        case 0:
            lines.insert(at, draw.choice(lines))
        case 1:
            del lines[at]
        case _:
            lines[at] = _json(lines[at], draw, words)
    return b"\n".join(lines)


def _safetensors(data: bytes, draw: random.Random, words: tuple[str, ...]) -> bytes:
    length = int.from_bytes(data[:8], "little")
    text = _json(data[8 : 8 + length], draw, words)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def _card(data: bytes, draw: random.Random, words: tuple[str, ...]) -> bytes:
    """Front matter as JSON, which is YAML, of a card whose own is JSON."""
    _, front, rest = data.split(b"---\n", 2)
    return b"---\n" + _json(front, draw, words) + b"\n---\n" + rest


def _toml(data: bytes, draw: random.Random, words: tuple[str, ...]) -> bytes:
    def spelt(value) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{json.dumps(str(k))} = {spelt(v)}" for k, v in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(map(spelt, value)) + "]"
        return {None: "1979-05-27T07:32:00Z"}.get(value) or json.dumps(value).replace("Infinity", "inf").replace("NaN", "nan")

    changed = tree(tomllib.loads(data.decode()), draw, words)
    return "".join(f"{json.dumps(str(key))} = {spelt(value)}\n" for key, value in changed.items()).encode("utf-8", "replace")


def _gguf(data: bytes, draw: random.Random, words: tuple[str, ...]) -> bytes:
    """Other values under its keys, other shapes, names and types of its tensors."""
    from targets import written

    opened = open_gguf(written("whole.gguf", data))
    metadata = dict(opened.metadata)
    tensors = [(t.name, t.shape, t.type, t.data.tobytes()) for t in opened.tensors.values()]
    for _ in range(draw.choice((1, 1, 2, 3))):
        key = draw.choice([*metadata, *words] or ["x"])
        old = metadata.get(key)
        if tensors and draw.random() < 0.3:
            at = draw.randrange(len(tensors))
            name, shape, kind, raw = tensors[at]
            match draw.randrange(4):
                case 0:
                    shape = tuple(draw.choice((1, 2, 32, 256, n, n + 1)) for n in shape)
                case 1:
                    shape = (*shape, 1) if len(shape) < 4 else shape[:1]
                case 2:
                    kind = TYPES[draw.choice(list(TYPES))]
                case 3:
                    name = draw.choice((*(t[0] for t in tensors), "", "x"))
            tensors[at] = (name, shape, kind, raw)
            if draw.random() < 0.2:
                del tensors[at]
        elif draw.random() < 0.15:
            metadata.pop(key, None)
        elif isinstance(old, list) and old and draw.random() < 0.5:
            metadata[key] = [str(v) if isinstance(v, (int, float)) else v for v in tree(old, draw) if isinstance(v, str)]
        elif isinstance(old, np.ndarray) and old.size and draw.random() < 0.5:
            longer = np.concatenate((old, old))
            metadata[key] = draw.choice((old[:-1], old[::-1].copy(), longer, old * 0, old.astype(np.float32)))
        else:
            metadata[key] = draw.choice(NUMBERS)
    header, offsets, size = header_bytes(metadata, [t[:3] for t in tensors], 32)
    out = bytearray(header + bytes(size - len(header)))
    for offset, (_, shape, kind, raw) in zip(offsets, tensors, strict=True):
        out[offset : offset + min(len(raw), kind.nbytes(shape))] = raw[: kind.nbytes(shape)]
    return bytes(out)


def _npz(data: bytes, draw: random.Random, words: tuple[str, ...]) -> bytes:
    """Other arrays in the zip, other JSON in its `about`, or another header of an array."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    name = "about.npy" if draw.random() < 0.5 else draw.choice(list(parts))
    if name == "about.npy" and draw.random() < 0.9:
        about = _json(np.load(io.BytesIO(parts[name])).tobytes(), draw, words)
        parts[name] = _npy(np.frombuffer(about, np.uint8))
    else:
        some = (np.zeros(0), np.zeros((2, 8)), np.zeros(8, np.int64), np.array("a"), np.array(5), np.full(8, np.nan))
        shapes = ((1 << 40,), (1 << 20, 1 << 20), (-1,), (1 << 62, 4), (0,), (2, 2, 2))
        huge = _npy(np.zeros(2)).replace(b"(2,), }", b"%s, }" % str(draw.choice(shapes)).encode())
        match draw.randrange(5):
            case 0:
                del parts[name]
            case 1:
                parts[name] = huge[:8] + struct.pack("<H", len(huge) - 26) + huge[10:] if draw.random() < 0.8 else huge
            case 2:
                parts[name] = _bytes(parts[name], draw, words)
            case _:
                parts[name] = _npy(draw.choice(some))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as file:
        for key, part in parts.items():
            file.writestr(key, part)
    return out.getvalue()


def _npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()


SHAPES = {
    "": _bytes,
    "json": _json,
    "lines": _lines,
    "safetensors": _safetensors,
    "card": _card,
    "toml": _toml,
    "gguf": _gguf,
    "npz": _npz,
}
