"""The JSON of a request within limits: how many values it has and how deep they are nested, of the whole and of each field.

Python reads JSON in one call that lets nothing else run, so the values are counted before it is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .checks import JsonObject, RequestError
from .field_limits import Limit

MAX_DEPTH = 128  # of lists and objects
MAX_FIELDS = 256  # of a request
_CHUNK = 1 << 20  # bytes that are counted together

_MAX_NODES = 1 << 17  # lists, objects and fields of objects, which take Python longer than other values

# byte -> 1 for each that begins or separates values; for each that makes a node; what it adds to the depth
_VALUES, _NODES, _STEPS = np.zeros((3, 256), np.int8)
_VALUES[list(b",:[{")], _NODES[list(b":[{")] = 1, 1
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1


def load_body(data: bytes, tokens: int) -> JsonObject:
    """The object in a body. tokens: token ids that its fields may hold.

    Raises RequestError for what is no JSON object, and for one with too many values, fields or levels.
    """
    counts = count_values(data)
    most = JsonCounts(values=2 * tokens + (1 << 16), nodes=_MAX_NODES, depth=MAX_DEPTH)
    for found, allowed, what in zip(
        counts, most, ("values", "lists, objects and fields", "levels of lists and objects"), strict=True
    ):
        if found > allowed:
            raise RequestError(f"the request has {found} {what}, and may have {allowed}", code="too_large")
    try:
        body = json.loads(data.decode("utf-8-sig", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError("the request has to be a JSON object", code="invalid_json")
    if len(body) > MAX_FIELDS:
        raise RequestError(f"the request has {len(body)} fields; up to {MAX_FIELDS} are read", code="too_large")
    return body


def check_fields(body: JsonObject, limits: Mapping[str, Limit], tokens: int) -> JsonObject:
    """The object, where a field without a limit has become None, so that nothing can depend on its value.

    limits: of each field that the route reads; tokens: values that a field may have beyond its limit where it holds token ids

    Raises RequestError for a field beyond its limit, which it names.
    """
    for name, value in body.items():
        limit = limits.get(name)
        if limit is None:
            body[name] = None
        else:
            _check(name, value, limit, tokens if limit.has_tokens else 0)
    return body


class JsonCounts(NamedTuple):
    """What a JSON text has: values and the names of fields, nodes (lists, objects and their fields), levels."""

    values: int
    nodes: int
    depth: int


def count_values(data: bytes) -> JsonCounts:
    """The counts of a JSON text, without reading it: no fewer values than there are, the others exact. Of a text that is not
    valid this holds up to its first fault."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    raw = np.frombuffer(data, np.uint8)
    n_values, nodes, depth, deepest, inside = 1, 0, 0, 0, False
    for start in range(0, len(raw), _CHUNK):
        chunk = raw[start : start + _CHUNK]
        is_inside = np.logical_xor.accumulate(np.concatenate(([inside], chunk == ord('"'))))[1:]
        outside, inside = chunk[~is_inside], bool(is_inside[-1])
        n_values += int(np.count_nonzero(_VALUES[outside]))
        nodes += int(np.count_nonzero(_NODES[outside]))
        depths = np.cumsum(_STEPS[outside], dtype=np.int64)
        if depths.size:
            deepest, depth = max(deepest, depth + int(depths.max())), depth + int(depths[-1])
    return JsonCounts(n_values, nodes, deepest)


def _check(name: str, value: Any, limit: Limit, tokens: int) -> None:
    """Raises RequestError for a field with more in it than its limit says."""
    most = limit.values + tokens
    characters = n_values = depth = 0
    level = [value]
    while level:
        n_values, depth = n_values + len(level), depth + 1
        below: list[Any] = []
        for each in level:
            kind = type(each)
            if kind is str:
                characters += len(each)
            elif kind is list:
                below += each
            elif kind is dict:
                characters += sum(map(len, each))
                below += each.values()
        level = below
    over = [
        f"{found} {what}, and may have {allowed}"
        for found, what, allowed in (
            (characters, "characters", limit.characters),
            (n_values, "values (lists, objects and what is in them)", most),
            (depth, "levels of lists and objects", limit.depth),
        )
        if allowed is not None and found > allowed
    ]
    if over:
        raise RequestError(f"{name} has {over[0]}", param=name, code="invalid_value")
