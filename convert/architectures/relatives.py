"""Known architectures that a checkpoint of an unknown one is like: those that suit its config.json and have its tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from ...data_classes import dataclass
from ...formats import FormatError
from ..config import Config
from ..draft_layers import unknown_prefixes
from ..model_spec import ModelSpec, TensorSpec

SHOWN = 3  # relatives, and kinds of tensors that one does not know
LEAST_ALIKE = 0.5  # share of kinds of tensors that both have, of those that either has
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Relative:
    """A known architecture compared with a checkpoint.

    name     as in config.json's architectures
    alike    share of kinds of tensors that both have, of those that either has; a kind is a name with N for each number
    unknown  kinds that the checkpoint has and the architecture does not
    missing  kinds that the architecture needs and the checkpoint lacks
    unread   how many keys of config.json mean nothing to the architecture
    """

    name: str
    alike: float
    unknown: tuple[str, ...]
    missing: tuple[str, ...]
    unread: int

    def __str__(self) -> str:
        if not self.unknown and not self.missing:
            return f"{self.name} (all its tensors)"
        parts = (f"{what} {_listed(kinds)}" for what, kinds in (("without", self.unknown), ("needs", self.missing)) if kinds)
        return f"{self.name} ({'; '.join(parts)})"


def relatives(
    config: Config, stored: Collection[str], known: Iterable[str], make: Callable[[str, Config], ModelSpec]
) -> list[Relative]:
    """The nearest of the known architectures that suit the config, best first: by kinds of tensors, then by the keys of
    config.json that they read.

    stored: names of the checkpoint's tensors; make: (architecture, config) -> what it makes
    of the config; raises FormatError
    """
    found = []
    for other in known:
        tried = Config(config.path, config.values | {"architectures": [other]}, config.n_stored)
        try:
            model = make(other, tried)
        except (FormatError, ArithmeticError, LookupError, TypeError, ValueError):  # the config is not one of its own
            continue
        found.append(_relative(other, model, stored, len(config.values.keys() - tried.asked)))
    found.sort(key=lambda r: (-r.alike, r.unread))  # of equals the first known
    return [relative for relative in found if relative.alike >= LEAST_ALIKE][:SHOWN]


def _relative(name: str, model: ModelSpec, stored: Collection[str], unread: int) -> Relative:
    named = {_renamed(tensor, model.renamed_prefixes) for tensor in stored}
    skipped = (*model.skipped_prefixes, *(model.draft.prefixes if model.draft else ()), *unknown_prefixes(model, named))
    kinds = {_kind(tensor) for tensor in named if not (skipped and tensor.startswith(skipped))}
    known, needed = set(), set()
    for spec in model.tensors:
        ways = [{_kind(source) for source in way.sources} for way in _ways(spec)]
        fallback = {_kind(spec.fallback_source)} if spec.fallback_source else set()
        known |= fallback.union(*ways)
        if not spec.is_optional and not fallback & kinds and not any(way <= kinds for way in ways):
            needed |= ways[0] - kinds
    common = kinds & known
    total = len(common) + len(kinds - known) + len(needed)
    return Relative(name, len(common) / max(total, 1), tuple(sorted(kinds - known)), tuple(sorted(needed)), unread)


def _ways(spec: TensorSpec | None) -> Iterator[TensorSpec]:
    while spec is not None:
        yield spec
        spec = spec.alternative


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    prefix = next((p for p in prefixes if name.startswith(p)), "")
    return prefixes.get(prefix, "") + name.removeprefix(prefix)


def _kind(name: str) -> str:
    """The name with N for each number; codes and scales of a quantised weight are of its kind."""
    stem, _, part = name.rpartition(".")
    is_quantised = part.startswith(("weight_", "qweight", "qzeros", "scales", "g_idx"))
    return _NUMBER.sub("N", f"{stem}.weight" if is_quantised else name)


def _listed(kinds: tuple[str, ...]) -> str:
    more = f" and {len(kinds) - SHOWN} more" if len(kinds) > SHOWN else ""
    return ", ".join(kinds[:SHOWN]) + more
