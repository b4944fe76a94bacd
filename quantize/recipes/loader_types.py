"""The types that a program which is to load the file knows: fallbacks and stand-ins of its own, and errors for all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...formats import TYPES, PlanError, TensorType
from ...formats.loaders import loader_of


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
            instead = ", ".join(self.alternatives(tensor_type))
            raise PlanError(
                f"{name} is to become {tensor_type.name} ({reason}), which {self.program} does not know; it knows {instead}"
            )

    def alternatives(self, tensor_type: TensorType) -> list[str]:
        """Names of types that the program knows: the plain one of the same bits, else the three nearest in size."""
        assert self.loader is not None
        plain = TYPES.plain(tensor_type)
        if plain is not tensor_type and self.reads(plain):
            return [plain.name]
        known = [TYPES[n] for n in TYPES if TYPES[n].codec is not None and TYPES[n].ftype is not None and self.reads(TYPES[n])]
        known = [t for t in known if t.rows == 1]
        return [t.name for t in sorted(known, key=lambda t: (abs(_bits(t) - _bits(tensor_type)), t.name))[:3]]


def _bits(tensor_type: TensorType) -> float:
    return 8 * tensor_type.block_bytes / tensor_type.block
