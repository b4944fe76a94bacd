"""Calibration texts: plain text files, and columns with texts or conversations of JSONL and parquet files.

A file is given as PATH or PATH:WEIGHT; `bundled` is the text that comes with the program (recipes/text/make.py). Conversations
are rendered by the model's chat template. Texts of one weight are concatenated to one stream of tokens, so that files shorter
than a window are not lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..data_classes import dataclass
from ..errors import FormatError, PlanError, installation
from ..formats.file_range import check_regular, read_file
from ..recipes import bundled_text, find_text
from ..runtime import Model, Tokenizer
from ..runtime.text.chat import Message, find_template, prompt_tokens
from .calibration import TextSegment

OWN_COLUMN = "generated"  # of texts that a model wrote: their control tokens count
COLUMNS = ("messages", "conversations", "text", "content", OWN_COLUMN)  # the first that exists is read
TABLE_SUFFIXES = (".jsonl", ".ndjson", ".parquet")  # of files with columns
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}


@dataclass(frozen=True)
class CalibrationText:
    """A file with calibration text; weight: how many times each of its tokens counts."""

    path: Path
    weight: int = 1


def parse_text(argument: str) -> CalibrationText:
    """'PATH' or 'PATH:WEIGHT' -> the text. Raises PlanError for what is neither a file nor a pipe, or a weight that is not a
    positive integer."""
    path, _, weight = argument.rpartition(":")
    if _is_readable(find_text(argument)) or not path:
        path, weight = argument, "1"
    path = find_text(path)
    if not _is_readable(path):
        problem = "there is no such file" if not path.exists() else "it is neither a file nor a pipe"
        problem = "it is a folder; give a file" if path.is_dir() else problem
        raise PlanError(f"-f {argument}: {problem}")
    if not (weight.isdecimal() and int(weight) > 0):
        raise PlanError(f"-f {argument}: the weight {weight!r} is no whole number above 0")
    return CalibrationText(path, int(weight))


def _is_readable(path: Path) -> bool:
    return path.is_file() or path.is_fifo()


def check_texts(texts: Sequence[CalibrationText]) -> None:
    """Raises PlanError if a text is given twice, or needs a package that is not installed."""
    seen: set[Path] = set()
    for text in texts:
        if text.path.resolve() in seen:
            raise PlanError(f"{text.path} is given twice: give it once, with a weight ({text.path}:2)")
        seen.add(text.path.resolve())
        if text.path.suffix == ".parquet":
            _parquet()


def decode_text(data: bytes, path: Path) -> str:
    """UTF-8 bytes -> text, with U+FFFD for invalid bytes. Raises PlanError for a file with zero bytes."""
    if b"\0" in data:
        raise PlanError(f"{path} is not a text file: it has a zero byte at {data.index(0):,}")
    return data.decode("utf-8", "replace")


def read_segments(
    model: Model,
    texts: Sequence[CalibrationText],
    *,
    column: str | None = None,
    template: str | None = None,
    max_tokens: int | None = None,
) -> list[TextSegment]:
    """Reads and tokenizes texts -> one segment per weight, in the order of the texts.

    column: of JSONL and parquet files, by default the first of COLUMNS that exists. template: as for `find_template`.
    max_tokens: reading stops once there are this many. Raises PlanError, and FormatError naming file and line.
    """
    reader, total = _Reader(model.tokenizer, model.metadata, column, template), 0
    by_weight: dict[int, tuple[list[int], list[tuple[str, int]]]] = {}
    for text in texts:
        if max_tokens is not None and total >= max_tokens:
            break
        ids, starts = by_weight.setdefault(text.weight, ([], []))
        starts.append((text.path.name, len(ids)))
        for document in reader.documents(text.path):
            ids += document
            total += len(document)
            if max_tokens is not None and total >= max_tokens:
                break
    return [TextSegment(ids, weight, starts) for weight, (ids, starts) in by_weight.items()]


def calibration_tokens(path: Path, tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> list[int]:
    """Token ids of a text, as `imatrix` reads it: of a plain file, or of the documents of a table one after the other.

    metadata: the model's, with its chat template. Raises PlanError, and FormatError naming file and line.
    """
    return [id for document in _Reader(tokenizer, metadata).documents(path) for id in document]


class _WithControlTokens(str):
    """A text in which the texts of control tokens stand for these tokens."""


class _Reader:
    """Reads documents as token ids."""

    def __init__(
        self, tokenizer: Tokenizer, metadata: Mapping[str, Any], column: str | None = None, template: str | None = None
    ):
        self._tokenizer, self._metadata, self._column, self._choice = tokenizer, metadata, column, template
        self._template: Any = None

    def documents(self, path: Path) -> Iterator[list[int]]:
        """The token ids of each document of a file."""
        if path.suffix not in TABLE_SUFFIXES:
            yield self._tokenizer.encode(decode_text(read_file(path, pipes=True), path))
            return
        is_empty = True
        read_rows = self._parquet_rows if path.suffix == ".parquet" else self._json_lines
        for where, value in read_rows(path):
            if isinstance(value, _WithControlTokens):
                ids = prompt_tokens(self._tokenizer, value)
            elif isinstance(value, str):
                ids = self._tokenizer.encode(value)
            elif path == bundled_text() and not self._has_template:
                ids = self._tokenizer.encode("\n\n".join(turn["content"] for turn in value))
            else:
                ids = self._conversation(value, where)
            is_empty = is_empty and not ids
            yield ids
        if is_empty:
            raise FormatError(f"{path}: there is no text in it")

    def _json_lines(self, path: Path) -> Iterator[tuple[str, Any]]:
        if not path.is_fifo():
            check_regular(path)
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                where = f"{path}, line {number}"
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise FormatError(f"{where}: not JSON ({error})") from None
                if isinstance(row, str | list):
                    yield where, row
                    continue
                if not isinstance(row, dict):
                    raise FormatError(f"{where}: neither an object nor a text")
                column = self._column_name(list(row), where, None if path == bundled_text() else self._column)
                is_own = column == OWN_COLUMN and isinstance(row[column], str)
                yield where, _WithControlTokens(row[column]) if is_own else row[column]

    def _parquet_rows(self, path: Path) -> Iterator[tuple[str, Any]]:
        check_regular(path)
        parquet = _parquet()
        try:
            file = parquet.ParquetFile(path)
            name = self._column_name(file.schema_arrow.names, str(path), self._column)
            for batch in file.iter_batches(256, columns=[name]):
                for value in batch.column(0).to_pylist():
                    if value is not None:
                        yield str(path), value
        except (OSError, ValueError) as error:  # pyarrow's exceptions are subclasses of ValueError
            raise FormatError(f"{path}: {str(error).splitlines()[0]}") from None

    @property
    def _has_template(self) -> bool:
        return self._choice is not None or bool(self._metadata.get("tokenizer.chat_template"))

    def _column_name(self, names: list[str], where: str, asked: str | None) -> str:
        candidates = COLUMNS if asked is None else (asked,)
        column = next((name for name in candidates if name in names), None)
        if column is None:
            problem = f"no column {asked!r}" if asked else f"none of the columns {', '.join(COLUMNS)}"
            raise FormatError(f"{where}: {problem}; there are {', '.join(map(str, names))} (--column chooses one)")
        return column

    def _conversation(self, value: Any, where: str) -> list[int]:
        if self._template is None:
            self._template = find_template(self._metadata, self._choice)
        try:
            text = self._template.render(_messages(value, where), add_generation_prompt=False)
        except PlanError as error:
            raise FormatError(f"{where}: {error}") from None
        return prompt_tokens(self._tokenizer, text)


def _messages(value: Any, where: str) -> list[Message]:
    """Messages with role and content, from such messages or from ShareGPT's with 'from' and 'value'."""
    if not isinstance(value, list) or not value or not all(isinstance(turn, dict) for turn in value):
        raise FormatError(f"{where}: neither a text nor a list of messages")
    messages = []
    for turn in value:
        if "from" in turn and "value" in turn and "role" not in turn:
            sender = turn["from"]
            role = _ROLES.get(sender) if isinstance(sender, str) else None
            turn = {"role": role or sender, "content": turn["value"]}
        if not isinstance(turn.get("role"), str) or "content" not in turn:
            raise FormatError(f"{where}: a message has no role or no content")
        turn = {key: field for key, field in turn.items() if field is not None}
        messages.append(
            {**turn, "content": _join_parts(turn["content"], where)} if isinstance(turn.get("content"), list) else turn
        )
    return messages


def _join_parts(parts: list[Any], where: str) -> str:
    """The text of a message whose content is a list of parts, which chat templates for text do not support."""
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise FormatError(f"{where}: a message has a part that is no text")
    return "".join(map(str, texts))


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise PlanError(f"parquet files need pyarrow: {installation('pyarrow')}") from None
    return pyarrow.parquet
