"""Whether the vocabulary of a GGUF cuts plain texts as the checkpoint's tokenizer.json does.

Not all that a tokenizer.json says has a counterpart in a GGUF, and not all of that can be seen from its settings: what is done
to the texts between added tokens, for example. So both encode some texts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import MillError
from ...formats import TensorSource
from ...formats.file_range import read_text
from ...operating_system.memory import trim_free_memory

if TYPE_CHECKING:
    from ...runtime.text.tokenizer import Tokenizer

_FILE = "tokenizer.json"
# Ordinary texts, in Unicode's composed form: what is rare, the tests of vocabularies look for.
TEXTS = (
    "Hello, world! How are you today?",
    "The quick brown fox jumps over the lazy dog.",
    "In 2024 it was 12 % of 3.5 million, not 1,234,567.89.",
    "It's what we'll do; they've said so, and I'd agree.",
    "First line.\nSecond line.\n\nA new paragraph.",
    "def f(x):\n    return x + 1\n\n\nclass A:\n\tpass\n",
    'for (int i = 0; i < n; i++) {\n        a[i] = "text";\n}',
    '{"name": "value", "list": [1, 2, 3], "empty": null}',
    "| a | b |\n|---|---|\n| 1 | 2 |\n",
    "# Title\n\n* one\n* two\n\n```sh\nls -la /usr/bin\n```\n",
    "https://example.com/a/b?c=d&e=f#g and user@example.com",
    "HTTPRequest camelCase snake_case SCREAMING_CASE x2 y=3",
    "two  spaces, three   spaces and a trailing one ",
    "E = mc² and π ≈ 3.14159, so x ≤ y → z",
    "Über Größe und Straßen spricht man in Köln.",
    "Où est la bibliothèque ? C'est là-bas, à côté.",
    "¿Dónde está el niño? ¡Aquí!",
    "Съешь ещё этих мягких французских булок.",
    "你好，世界。今天是2024年。",
    "こんにちは、世界。カタカナと漢字。",
    "안녕하세요, 세계!",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "I 🙂 this, 👍🏽 really!",
    "<b>bold</b> & <i>italic</i>",
)


def vocabulary_differences(source: TensorSource) -> list[str]:
    """A note if the source's vocabulary, made from a tokenizer.json, gives some of TEXTS other token ids than that does; []
    without such a file."""
    path = tokenizer_file(source)
    if path is None:
        return []
    try:  # one tokenizer after the other: each takes more memory than what is written of a large vocabulary
        expected = _expected(path)
        trim_free_memory()
        others = _others(source, expected)
    except Exception:  # of `tokenizers`, which has no exceptions of its own: a file that it cannot use cannot be compared
        return []
    finally:
        trim_free_memory()
    if not others:
        return []
    added = [token["content"] for token in json.loads(read_text(path))["added_tokens"]]
    found = [next((token for token in added if token.replace("\u2581", " ") in f" {text}"), None) for text in others]
    reason = ""
    if None not in found:
        reason = f": each has an added token in it (this one {found[0]!r}), and a GGUF cannot say how the text around is read"
    return [
        f"of {len(TEXTS)} plain texts {len(others)} have other token ids with the GGUF's vocabulary than with {_FILE}, "
        f"such as {others[0]!r}{reason}"
    ]


def tokenizer_file(source: TensorSource) -> Path | None:
    """The tokenizer.json that the source's vocabulary can be compared with."""
    has_tokens = "tokenizer.ggml.tokens" in source.metadata
    return next((path for path in source.files if path.name == _FILE), None) if has_tokens else None


def _expected(path: Path) -> list[list[int]]:
    """The ids of TEXTS. Raises what `tokenizers` raises."""
    from tokenizers import Tokenizer as Original

    encoded = Original.from_file(str(path)).encode_batch(list(TEXTS), add_special_tokens=False)
    return [each.ids for each in encoded]


def _others(source: TensorSource, expected: list[list[int]]) -> list[str]:
    """Those of TEXTS that get other ids than expected."""
    from ...runtime.text.tokenizer import Tokenizer

    ours = Tokenizer(source.metadata)
    return [text for text, ids in zip(TEXTS, expected, strict=True) if _encoded(ours, text) != ids]


def _encoded(tokenizer: Tokenizer, text: str) -> list[int] | None:
    try:
        return tokenizer.encode(text, add_special=False, parse_special=True)
    except MillError:  # it has no token for a part of the text
        return None
