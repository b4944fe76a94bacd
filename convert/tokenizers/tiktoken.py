"""tiktoken's files: a line for each token, its bytes in base 64 and its rank, which is its id (Kimi, Qwen 1, Llama 3).

Such a file has neither merges nor the rule that cuts words. A token's merge is the pair that comes together last when its bytes
are merged by ranks below its own; the rule is known by the family that config.json names.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

from ...formats import FormatError

FILES = ("tiktoken.model", "qwen.tiktoken", "tokenizer.model")
# beginning of model_type -> name for tokenizer.ggml.pre
RULES = {"kimi": "kimi-k2", "qwen": "qwen2", "llama": "llama-bpe"}


def is_ranks(path: Path) -> bool:
    """Whether a file looks like one of these (tokenizer.model may be SentencePiece's instead)."""
    try:
        with path.open("rb") as file:
            first = file.readline(4096).split()
        return len(first) == 2 and first[1].isdigit() and bool(base64.b64decode(first[0], validate=True))
    except (OSError, ValueError):
        return False


def read_ranks(path: Path) -> dict[bytes, int]:
    """bytes of a token -> rank, in order of rank. Raises FormatError for malformed lines, ranks or tokens that come twice."""
    ranks: dict[bytes, int] = {}
    try:
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            if not line.strip():
                continue
            try:
                text, rank = line.split()
                token = base64.b64decode(text, validate=True)
                if not token or token in ranks:
                    raise ValueError("an empty token, or one that was there before")
                ranks[token] = int(rank)
            except (ValueError, binascii.Error) as error:
                raise FormatError(f"{path}: line {number} is no token with its rank ({error})") from None
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    if len(set(ranks.values())) != len(ranks):
        raise FormatError(f"{path}: several tokens have the same rank")
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pair that makes each token of more than a byte, in order of rank."""
    pairs = []
    for token, rank in ranks.items():
        parts = _merged(ranks, token, rank) if len(token) > 1 else []
        if len(parts) == 2:
            pairs.append((parts[0], parts[1]))
    return pairs


def _merged(ranks: dict[bytes, int], token: bytes, below: int) -> list[bytes]:
    """What the bytes of a token become by merges of ranks below a number."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best, at = below, -1
        for i in range(len(parts) - 1):
            rank = ranks.get(parts[i] + parts[i + 1], below)
            if rank < best:
                best, at = rank, i
        if at < 0:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
