"""The types that a program which is to load the file knows: fallbacks and stand-ins of its own, and errors for all others."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ...formats import TYPES, PlanError, TensorType
from ...formats.loaders import loader_of

_KEEPS_WELL = r"(?i)i?q\d_(?![01])"  # k- and i-quants: less error than the older types of the same size


class LoaderTypes:
    """program: one of `loaders.PROGRAMS`, or None for every type. Raises PlanError for another."""

    def __init__(self, program: str | None):
        self.program, self.loader = program, loader_of(program) if program is not None else None

    def reads(self, tensor_type: TensorType) -> bool:
        return self.loader is None or self.loader.reads(tensor_type.id)

    @property
    def fallbacks(self) -> Mapping[str, str]:
        """Fallbacks of types whose blocks do not divide the row length, where they differ from the table of types."""
        return self.loader.fallbacks if self.loader is not None else {}

    def of_mix(self, tensor_type: TensorType) -> TensorType:
        """What a stock mix's exception becomes: a type that the program does not know is replaced by the one nearest to it."""
        if self.loader is None or self.reads(tensor_type):
            return tensor_type
        plain = TYPES.plain(tensor_type)
        return TYPES[self.loader.stand_ins.get(plain.name, plain.name)]

    def usual(self, types: Sequence[str]) -> list[str]:
        """The usual types to choose from that the program knows, and what stands in for the others."""
        return list(dict.fromkeys(self.of_mix(TYPES[name]).name for name in types if self.reads(self.of_mix(TYPES[name]))))

    def check(self, name: str, tensor_type: TensorType, reason: str) -> None:
        """Raises PlanError for a tensor of a type that the program does not know. reason: the rule that asks for it."""
        if not self.reads(tensor_type):
            raise PlanError(
                f"{name} is to become {tensor_type.name} ({reason}), which {self.program} does not know; "
                f"{self.alternatives(tensor_type)}"
            )

    def alternatives(self, tensor_type: TensorType) -> str:
        """Which types the program knows instead, for a message: 'it knows q4_K', 'of like size it knows iq4_xs, q4_K'."""
        names = self._alternatives(tensor_type)
        plain = TYPES.plain(tensor_type).name
        return f"it knows {plain}" if names == [plain] else f"of like size it knows {', '.join(names)}"

    def _alternatives(self, tensor_type: TensorType) -> list[str]:
        """The plain type of the same bits, else the three nearest in size, k- and i-quants before others."""
        assert self.loader is not None
        plain = TYPES.plain(tensor_type)
        if plain is not tensor_type and self.reads(plain):
            return [plain.name]
        known = [TYPES[n] for n in TYPES if TYPES[n].codec is not None and TYPES[n].ftype is not None and self.reads(TYPES[n])]
        known = [t for t in known if t.rows == 1]
        near = sorted(known, key=lambda t: (not re.match(_KEEPS_WELL, t.name), abs(_bits(t) - _bits(tensor_type)), t.name))
        return [t.name for t in near[:3]]


def _bits(tensor_type: TensorType) -> float:
    return 8 * tensor_type.block_bytes / tensor_type.block
