"""Errors of requests, and checks of single values: each returns the value, or raises a RequestError that names the field."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

from ....errors import PlanError
from ...generation.sampling_options import MAX_BREAKER, parse_samplers

JsonObject = dict[str, Any]


_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 501: "not_supported_error"}
CONTEXT_EXCEEDED = "context_length_exceeded"  # OpenAI's code


class RequestError(Exception):
    """An error of OpenAI's API. param: the invalid field; code: an identifier for programs; status: of HTTP; details: further
    fields of the error object."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400, **details: int):
        super().__init__(message)
        self.message, self.param, self.code, self.status, self.details = message, param, code, status, details

    def as_json(self) -> JsonObject:
        """The error object. Its type for a prompt that is too long is llama-server's, whose clients look for it."""
        error_type = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        if self.code == CONTEXT_EXCEEDED:
            error_type = "exceed_context_size_error"
        error = {"message": self.message, "type": error_type, "param": self.param, "code": self.code}
        return {"error": error | self.details}


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Within this, errors of a request that was made of another one name the fields of that. names: field of the request that
    was made -> field that the client sent; those below it (`field.name`, `field[0]`) go with it. Raises RequestError."""
    try:
        yield
    except RequestError as error:
        param = error.param or ""
        made = max((name for name in names if param == name or param.startswith((f"{name}.", f"{name}["))), key=len, default="")
        if not made:
            raise
        sent = names[made] + param.removeprefix(made)
        message = error.message.replace(param, sent, 1)
        raise RequestError(message, sent, error.code, error.status, **error.details) from None


Check = Callable[[str, Any], Any]

_MAX_STOP_LENGTH = 4096  # characters; each token of an answer is compared with the stop texts

_MAX_BREAKERS = 16  # each is searched in the whole vocabulary

_MAX_BIASES, _MAX_BIAS = 4096, 1e4
_BANNED = -100  # OpenAI's API: this bias excludes a token


def invalid(name: str, expected: str, value: Any) -> RequestError:
    """The error that names a field, what it has to be, and what it is."""
    shown = json.dumps(_beginning(value), default=str)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return RequestError(f"{name} has to be {expected}, not {shown}", param=name, code="invalid_value")


def _beginning(value: Any, levels: int = 3) -> Any:
    """As much of a value as an error shows: a large one takes long to write."""
    if isinstance(value, str):
        return value[:64]
    if not levels or not isinstance(value, list | dict):
        return value if levels else "..."
    if isinstance(value, list):
        return [_beginning(each, levels - 1) for each in value[:20]]
    return {key[:64]: _beginning(each, levels - 1) for key, each in islice(value.items(), 10)}


def number(low: float, high: float, integer: bool = False) -> Check:
    """A check for numbers from low to high. As all checks here, it raises RequestError, which names the field."""
    expected = "an integer" if integer else "a number"

    def check(name: str, value: Any) -> Any:
        valid = isinstance(value, int) if integer else isinstance(value, int | float)
        if not valid or isinstance(value, bool) or not low <= value <= high:
            raise invalid(name, f"{expected} from {low} to {high}", value)
        return value

    return check


def flag(name: str, value: Any) -> bool:
    """Checks for true or false."""
    if not isinstance(value, bool):
        raise invalid(name, "true or false", value)
    return value


def text(name: str, value: Any) -> str:
    """Checks for a text."""
    if not isinstance(value, str):
        raise invalid(name, "a text", value)
    return value


def json_object(name: str, value: Any) -> JsonObject:
    """Checks for an object."""
    if not isinstance(value, dict):
        raise invalid(name, "an object", value)
    return value


def stop_texts(name: str, value: Any) -> list[str]:
    """Checks texts that end an answer; returns a list."""
    texts = [value] if isinstance(value, str) else value
    valid = isinstance(texts, list) and len(texts) <= 16
    if not valid or not all(isinstance(t, str) and 0 < len(t) <= _MAX_STOP_LENGTH for t in texts):
        raise invalid(name, f"a text or a list of up to 16 texts of at most {_MAX_STOP_LENGTH} characters", value)
    return texts


def breakers(name: str, value: Any) -> tuple[str, ...]:
    """Checks the sequence breakers of DRY."""
    valid = isinstance(value, list) and len(value) <= _MAX_BREAKERS
    if not valid or not all(isinstance(each, str) and 0 < len(each) <= MAX_BREAKER for each in value):
        raise invalid(name, f"a list of up to {_MAX_BREAKERS} texts of at most {MAX_BREAKER} characters", value)
    return tuple(value)


def samplers(name: str, value: Any) -> tuple[str, ...]:
    """Checks the names of samplers in their order, or llama.cpp's letters for them."""
    if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
        raise invalid(name, "a list of names of samplers", value)
    try:
        return parse_samplers(value)
    except PlanError as error:
        raise RequestError(f"{name}: {error}", param=name, code="invalid_value") from None


def token_limit(name: str, value: Any) -> int:
    """Checks a number of tokens, of which -1 is no limit."""
    if type(value) is not int or value != -1:
        number(1, 1 << 30, integer=True)(name, value)
    return value


def seed(name: str, value: Any) -> int | None:
    """Checks a seed; returns it as `Sampling` takes it: None is a random one."""
    number(-(1 << 63), (1 << 64) - 1, integer=True)(name, value)
    return None if value == -1 else value % (1 << 64)


def logit_bias(name: str, value: Any) -> dict[int | str, float]:
    """Checks biases of tokens: OpenAI's object of ids and numbers, or llama.cpp's list of pairs [id or text, number or false].

    Returns them by id or text; false, and -100 or less, is -inf.
    """
    pairs = value.items() if isinstance(value, dict) else value
    if not isinstance(value, dict | list) or len(value) > _MAX_BIASES:
        raise invalid(name, f"an object of at most {_MAX_BIASES} token ids and numbers", value)
    biases: dict[int | str, float] = {}
    for pair in pairs:
        token, bias = pair if isinstance(pair, list | tuple) and len(pair) == 2 else (None, None)
        if isinstance(value, dict) and isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 10:
            token = int(token)
        if isinstance(token, bool) or not isinstance(token, int | str) or token == "":
            raise invalid(name, "token ids or texts, each with a number", pair)
        if bias is False:
            bias = -math.inf
        elif isinstance(bias, bool) or not isinstance(bias, int | float) or not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise invalid(f"{name}[{str(token)[:20]}]", "a number", bias)
        biases[token] = -math.inf if bias <= _BANNED else float(bias)
    return biases
