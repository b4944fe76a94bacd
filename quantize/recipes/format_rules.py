"""A choice of types as the text of a recipe: a rule per role and type, with the layers as a regex."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ...formats import TensorType


def rules_text(types: Mapping[str, TensorType], others: Sequence[str] = ()) -> str:
    """`regex=type` lines that give each name its type, no name two, and none of `others` any. First-match order is no matter.

    Layers with the same type of a role share a rule: `^blk\\.(?:[3-9]|1[0-9])\\.ffn_up\\.weight$=iq2_k`.
    """
    layers: dict[str, dict[str, list[int]]] = {}
    lines = []
    for name, kind in types.items():
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        if match is None:
            lines.append(f"^{re.escape(name)}$={kind.name}")
        else:
            layers.setdefault(match[2], {}).setdefault(kind.name, []).append(int(match[1]))
    for role, by_type in layers.items():
        last = rf"{re.escape(role)}$"
        foreign = any(re.fullmatch(rf"blk\.\d+\.{re.escape(role)}", name) for name in others)
        for kind, numbers in sorted(by_type.items(), key=lambda item: -len(item[1])):
            everywhere = len(by_type) == 1 and not foreign
            which = "[0-9]+" if everywhere else layers_regex(numbers)
            which = f"(?:{which})" if "|" in which else which
            lines.append(rf"^blk\.{which}\.{last}={kind}")
    return "\n".join(lines) + "\n"


def layers_regex(numbers: Sequence[int]) -> str:
    """A regex that matches exactly these whole numbers, all of their digits: [3, 4, 5, 10, 11] -> '[3-5]|1[01]'."""
    return _alternatives({str(number) for number in numbers})


def _alternatives(numbers: set[str]) -> str:
    endings: dict[str, set[str]] = {}  # all but the last digit -> last digits
    for number in numbers:
        endings.setdefault(number[:-1], set()).add(number[-1])
    alone = endings.pop("", None)
    parts = [] if alone is None else [_class(alone)]
    alike: dict[str, set[str]] = {}  # class of last digits -> what they follow
    for start, digits in endings.items():
        alike.setdefault(_class(digits), set()).add(start)
    for digits, starts in sorted(alike.items(), key=lambda item: min(map(int, item[1]))):
        before = _alternatives(starts)
        parts.append((f"(?:{before})" if "|" in before else before) + digits)
    return "|".join(parts)


def _class(digits: set[str]) -> str:
    """A set of digits: '7', '[25]', '[3-9]'. A range and digits in one, `[0-24]`, would read like the numbers 0 to 24."""
    inside = "".join(sorted(digits))
    if len(inside) == 1:
        return inside
    if len(inside) > 2 and int(inside[-1]) - int(inside[0]) == len(inside) - 1:
        inside = f"{inside[0]}-{inside[-1]}"
    return f"[{inside}]"
