"""Calibration texts: plain files, and columns of JSONL and parquet files that hold texts or conversations.

A file is given as PATH or PATH:WEIGHT. Conversations go through the model's chat template. Texts of equal weight follow each
other in one stream of tokens, so that small files are not lost at the ends of windows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..formats import FormatError, PlanError
from ..runtime import Model
from ..runtime.text.chat import Message, find_template, prompt_tokens
from .calibration import Stretch

COLUMNS = ("messages", "conversations", "text", "content")  # looked for in this order
ROWS = (".jsonl", ".ndjson", ".parquet")  # files that have columns
_SPEAKERS = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}


@dataclass(frozen=True)
class Text:
    """weight: how often every token of it counts."""

    path: Path
    weight: int = 1


def parse_text(given: str) -> Text:
    """'PATH' or 'PATH:WEIGHT'. Raises PlanError for a file that is not there, or a weight that is no whole number above 0."""
    path, _, weight = given.rpartition(":")
    if Path(given).is_file() or not path:
        path, weight = given, "1"
    if not Path(path).is_file():
        problem = "it is a folder; give a file" if Path(path).is_dir() else "there is no such file"
        raise PlanError(f"-f {given}: {problem}")
    if not (weight.isdecimal() and int(weight) > 0):
        raise PlanError(f"-f {given}: the weight {weight!r} is no whole number above 0")
    return Text(Path(path), int(weight))


def check_texts(texts: Sequence[Text]) -> None:
    """Raises PlanError when a text needs a package that is not installed, or is given twice."""
    seen: set[Path] = set()
    for text in texts:
        if text.path.resolve() in seen:
            raise PlanError(f"{text.path} is given twice: give it once, with a weight ({text.path}:2)")
        seen.add(text.path.resolve())
        if text.path.suffix == ".parquet":
            _parquet()


def decoded(data: bytes, path: Path) -> str:
    """A text that may have a wrong byte somewhere. Raises PlanError for what is no text at all."""
    if b"\0" in data:
        raise PlanError(f"{path} is no text: it has a zero byte at {data.index(0):,}")
    return data.decode("utf-8", "replace")


def stretches(
    model: Model, texts: Sequence[Text], *, column: str | None = None, template: str | None = None, enough: int | None = None
) -> list[Stretch]:
    """One for each weight there is, in the order of the texts.

    column: of JSONL and parquet files; without it the first of COLUMNS that there is. template: as for `find_template`. enough:
    no more is read than makes so many tokens. Raises PlanError, FormatError naming file and line.
    """
    reader, total = _Reader(model, column, template), 0
    found: dict[int, tuple[list[int], list[tuple[str, int]]]] = {}
    for text in texts:
        if enough is not None and total >= enough:
            break
        ids, starts = found.setdefault(text.weight, ([], []))
        starts.append((text.path.name, len(ids)))
        for piece in reader.pieces(text.path):
            ids += piece
            total += len(piece)
            if enough is not None and total >= enough:
                break
    return [Stretch(ids, weight, starts) for weight, (ids, starts) in found.items()]


class _Reader:
    def __init__(self, model: Model, column: str | None, template: str | None):
        self._model, self._column, self._choice = model, column, template
        self._template: Any = None

    def pieces(self, path: Path) -> Iterator[list[int]]:
        """Token ids of a file, document by document."""
        if path.suffix not in ROWS:
            yield self._model.tokenizer.encode(decoded(path.read_bytes(), path))
            return
        empty = True
        read = self._parquet_rows if path.suffix == ".parquet" else self._json_lines
        for where, value in read(path):
            if isinstance(value, str):
                ids = self._model.tokenizer.encode(value)
            else:
                ids = self._conversation(value, where)
            empty = empty and not ids
            yield ids
        if empty:
            raise FormatError(f"{path}: there is no text in it")

    def _json_lines(self, path: Path) -> Iterator[tuple[str, Any]]:
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
                yield where, row[self._name(list(row), where)]

    def _parquet_rows(self, path: Path) -> Iterator[tuple[str, Any]]:
        parquet = _parquet()
        try:
            file = parquet.ParquetFile(path)
            name = self._name(file.schema_arrow.names, str(path))
            for batch in file.iter_batches(256, columns=[name]):
                for value in batch.column(0).to_pylist():
                    if value is not None:
                        yield str(path), value
        except (OSError, ValueError) as error:  # those of pyarrow are kinds of ValueError
            raise FormatError(f"{path}: {str(error).splitlines()[0]}") from None

    def _name(self, names: list[str], where: str) -> str:
        wanted = COLUMNS if self._column is None else (self._column,)
        found = next((name for name in wanted if name in names), None)
        if found is None:
            asked = f"no column {self._column!r}" if self._column else f"none of the columns {', '.join(COLUMNS)}"
            raise FormatError(f"{where}: {asked}; there are {', '.join(map(str, names))} (--column chooses one)")
        return found

    def _conversation(self, value: Any, where: str) -> list[int]:
        if self._template is None:
            self._template = find_template(self._model.metadata, self._choice)
        try:
            text = self._template.render(_messages(value, where), add_generation_prompt=False)
        except PlanError as error:
            raise FormatError(f"{where}: {error}") from None
        return prompt_tokens(self._model.tokenizer, text)


def _messages(value: Any, where: str) -> list[Message]:
    """Messages with role and content, from those or from the older spelling with 'from' and 'value'."""
    if not isinstance(value, list) or not value or not all(isinstance(turn, dict) for turn in value):
        raise FormatError(f"{where}: neither a text nor a list of messages")
    messages = []
    for turn in value:
        if "from" in turn and "value" in turn and "role" not in turn:
            speaker = turn["from"]
            known = _SPEAKERS.get(speaker) if isinstance(speaker, str) else None
            turn = {"role": known or speaker, "content": turn["value"]}
        if not isinstance(turn.get("role"), str) or "content" not in turn:
            raise FormatError(f"{where}: a message has no role or no content")
        turn = {key: field for key, field in turn.items() if field is not None}
        messages.append({**turn, "content": _joined(turn["content"], where)} if isinstance(turn.get("content"), list) else turn)
    return messages


def _joined(parts: list[Any], where: str) -> str:
    """The text of content that is given in parts, which templates of text do not know."""
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise FormatError(f"{where}: a message has a part that is no text")
    return "".join(map(str, texts))


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise PlanError("parquet files need pyarrow: pip install pyarrow") from None
    return pyarrow.parquet
