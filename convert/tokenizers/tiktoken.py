"""tiktoken's files: per line the bytes of a token in base64 and its rank, which is its id (Kimi, Hunyuan, Qwen 1, Llama 3, 4).

Such a file has neither merges nor the pre-tokenizer. A token's merge is the pair that is left when its bytes are merged by
ranks below its own; the pre-tokenizer follows from config.json's model_type.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

from ...formats import FormatError
from ...formats.file_range import check_regular, read_file

FILES = ("tiktoken.model", "qwen.tiktoken", "hy.tiktoken", "tokenizer.model")
# prefix of model_type -> name for tokenizer.ggml.pre; of several the first
PRE_TOKENIZERS = {"kimi": "kimi-k2", "qwen": "qwen2", "hunyuan": "hunyuan", "llama4": "llama4", "llama": "llama-bpe"}
# file -> special tokens that the code beside the models adds after the last rank, and which of them are which
_HUNYUAN = ("<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>", *(f"<|extra_{i}|>" for i in range(205)))
ADDED_TOKENS = {"hy.tiktoken": _HUNYUAN}
SPECIAL_TOKENS = {"hy.tiktoken": {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}}
NORMALISED = ("qwen.tiktoken", "hy.tiktoken")  # whose texts are brought to NFC


def is_ranks_file(path: Path) -> bool:
    """Whether a file looks like tiktoken's (tokenizer.model may be SentencePiece's instead)."""
    check_regular(path)
    try:
        with path.open("rb") as file:
            first = file.readline(4096).split()
        return len(first) == 2 and first[1].isdigit() and bool(base64.b64decode(first[0], validate=True))
    except (OSError, ValueError):
        return False


def read_ranks(path: Path) -> dict[bytes, int]:
    """Bytes of a token -> rank, in order of rank. Raises FormatError for malformed lines and duplicate ranks or tokens."""
    ranks: dict[bytes, int] = {}
    try:
        for number, line in enumerate(read_file(path).splitlines(), 1):
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
    """The pair that each token of more than one byte is merged from, in order of rank."""
    pairs = []
    for token, rank in ranks.items():
        parts = _merge_bytes(ranks, token, rank) if len(token) > 1 else []
        if len(parts) == 2:
            pairs.append((parts[0], parts[1]))
    return pairs


def _merge_bytes(ranks: dict[bytes, int], token: bytes, max_rank: int) -> list[bytes]:
    """The parts of a token after all merges with ranks below max_rank, but at least two."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best, left = max_rank, -1
        for i in range(len(parts) - 1):
            rank = ranks.get(parts[i] + parts[i + 1], max_rank)
            if rank < best:
                best, left = rank, i
        if left < 0:
            break
        parts[left : left + 2] = [parts[left] + parts[left + 1]]
    return parts
