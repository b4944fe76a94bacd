"""The texts that models are judged with, each a domain: their windows one behind the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...data_classes import dataclass
from ...errors import UsageError
from ...formats.file_range import read_file
from ...imatrix.texts import decode_text
from ...runtime import Model
from ...runtime.evaluate.perplexity import cut_windows
from ...runtime.evaluate.provenance import describe_text
from ...runtime.evaluate.score_statistics import exp


@dataclass(frozen=True)
class Domain:
    """A text with a name."""

    name: str
    path: Path


@dataclass(frozen=True)
class DomainFigures:
    """What a model does on the windows of one text; errors are standard errors, by window."""

    name: str
    windows: int
    kld: float
    kld_error: float | None
    perplexity: float
    baseline_perplexity: float


def parse_domains(texts: str | Path | Sequence[str | Path] | None, flag: str = "-f") -> list[Domain]:
    """'PATH' or 'NAME=PATH', one or several; a text without a name is called as its file. flag: of the option. Raises
    UsageError for two of one name."""
    given = [] if texts is None else [texts] if isinstance(texts, str | Path) else list(texts)
    domains: list[Domain] = []
    for text in map(str, given):
        name, _, path = text.partition("=")
        domains.append(
            Domain(name, Path(path)) if path and name and not Path(text).exists() else Domain(Path(text).stem, Path(text))
        )
    names = [domain.name for domain in domains]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"{flag}: two files are called {twice}; give them names ({flag} NAME=FILE)")
    return domains


@dataclass(frozen=True)
class JudgedText:
    """The windows int64 [n, n_ctx] of all texts, and which of them each domain has.

    about: what `describe_text` says, of several texts of all of them; None: only tokens are known
    """

    tokens: np.ndarray
    parts: dict[str, slice]
    about: dict[str, Any] | None

    def figures(self, result: dict[str, Any]) -> list[DomainFigures]:
        """A result's figures for each domain; none for a single one, or for a result that has none by window."""
        klds, losses, base = (result.get(f"window_{name}") for name in ("klds", "losses", "base_losses"))
        if len(self.parts) < 2 or not klds or not losses or not base:
            return []
        found = []
        for name, part in self.parts.items():
            own = np.asarray(klds[part])
            error = float(own.std(ddof=1) / math.sqrt(len(own))) if len(own) > 1 else None
            means = [exp(float(np.mean(values[part]))) for values in (losses, base)]
            found.append(DomainFigures(name, len(own), float(own.mean()), error, means[0], means[1]))
        return found


def read_domains(model: Model, domains: Sequence[Domain], n_ctx: int, chunks: int | None) -> JudgedText:
    """Reads the texts, of each at most `chunks` windows. Raises PlanError for one that does not fill a window."""
    windows, parts, about, start = [], {}, [], 0
    for domain in domains:
        data = read_file(domain.path, pipes=True)
        windows.append(cut_windows(model, decode_text(data, domain.path), n_ctx, chunks))
        about.append(describe_text(data, domain.path.name))
        parts[domain.name] = slice(start, start := start + len(windows[-1]))
    one = about[0] if len(about) == 1 else {"name": ", ".join(parts), "texts": about}
    return JudgedText(np.concatenate(windows), parts, one)
