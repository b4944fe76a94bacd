"""How results look as the last line of a notebook's cell or of an interpreter: one line, and a table where HTML is drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

C = TypeVar("C", bound=type)
_WIDTH, _VALUE, _ROWS = 180, 40, 50  # characters of a line and of a value in it; rows of a table


def shown(cls: C) -> C:
    """Decorator of a result's dataclass: its repr is one line with the figures and how many items collections have; in a
    notebook it is a table of its first list of records, or of its fields."""
    cls.__repr__ = _line  # type: ignore[method-assign]
    cls._repr_html_ = _table  # type: ignore[attr-defined]
    return cls


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.repr}


def _line(self: Any) -> str:
    text = f"<{type(self).__name__}"
    for name, value in _fields(self).items():
        part = _short(value)
        if part and len(text) + len(name) + len(part) + 3 < _WIDTH:
            text += f" {name}={part}"
    return f"{text}>"


def _short(value: Any) -> str:
    """A value in a few characters; '' for what has no figure, and for nothing."""
    if value is None or (isinstance(value, str) and not value):
        return ""
    if isinstance(value, bool | int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str | Path):
        text = str(value)
        return repr(text if len(text) <= _VALUE else f"...{text[3 - _VALUE :]}")
    if isinstance(value, Mapping | Sequence | set):
        return f"[{len(value)}]"
    return ""


def _table(self: Any) -> str:
    from html import escape  # which has 2,000 names of characters

    name = escape(type(self).__name__)
    for field, value in _fields(self).items():
        records = _records(value)
        if records:
            headings = list(dict.fromkeys(key for record in records for key in record))
            rows = [[_short(record.get(key)).strip("'") for key in headings] for record in records[:_ROWS]]
            more = f"<p>and {len(value) - _ROWS} more</p>" if len(value) > _ROWS else ""
            return f"<p>{name}, {escape(field)}</p>{_html(headings, rows)}{more}"
    return f"<p>{name}</p>" + _html(["", ""], [[key, _short(value)] for key, value in _fields(self).items() if _short(value)])


def _records(value: Any) -> list[dict[str, Any]]:
    """The first items of a list of records as dictionaries; none of another value."""
    items = list(value[:_ROWS]) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else []
    if items and all(isinstance(item, Mapping) for item in items):
        return [dict(item) for item in items]
    if items and all(dataclasses.is_dataclass(item) and not isinstance(item, type) for item in items):
        return [_fields(item) for item in items]
    return []


def _html(headings: list[str], rows: list[list[str]]) -> str:
    from html import escape

    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
