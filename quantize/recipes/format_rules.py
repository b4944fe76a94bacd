"""Writing a selection of types as the text of a recipe: one rule per role and type, the layers as a regex."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ...formats import TensorType


def rules_text(types: Mapping[str, TensorType], others: Sequence[str] = ()) -> str:
    """`regex=type` lines that give each tensor name its type and match none of `others`.

    No two rules match the same name, so their order does not matter. Layers where a role has the same type share a rule:
    `^blk\\.(?:[3-9]|1[0-9])\\.ffn_up\\.weight$=iq2_k`.
    """
    layers: dict[str, dict[str, list[int]]] = {}  # role -> type name -> layers
    lines = []
    for name, tensor_type in types.items():
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        if match is None:
            lines.append(f"^{re.escape(name)}$={tensor_type.name}")
        else:
            layers.setdefault(match[2], {}).setdefault(tensor_type.name, []).append(int(match[1]))
    for role, layers_by_type in layers.items():
        in_others = any(re.fullmatch(rf"blk\.\d+\.{re.escape(role)}", name) for name in others)
        for type_name, numbers in sorted(layers_by_type.items(), key=lambda item: -len(item[1])):
            all_layers = len(layers_by_type) == 1 and not in_others
            layer_regex = "[0-9]+" if all_layers else layers_regex(numbers)
            layer_regex = f"(?:{layer_regex})" if "|" in layer_regex else layer_regex
            lines.append(rf"^blk\.{layer_regex}\.{re.escape(role)}$={type_name}")
    return "\n".join(lines) + "\n"


def layers_regex(numbers: Sequence[int]) -> str:
    """A regex for exactly these integers, to be matched against all digits: [3, 4, 5, 10, 11] -> '[3-5]|1[01]'."""
    return _alternatives({str(number) for number in numbers})


def _alternatives(numbers: set[str]) -> str:
    last_digits: dict[str, set[str]] = {}  # digits before the last -> last digits
    for number in numbers:
        last_digits.setdefault(number[:-1], set()).add(number[-1])
    single = last_digits.pop("", None)
    parts = [] if single is None else [_digit_class(single)]
    prefixes: dict[str, set[str]] = {}  # class of last digits -> the digits before them
    for prefix, digits in last_digits.items():
        prefixes.setdefault(_digit_class(digits), set()).add(prefix)
    for digit_class, starts in sorted(prefixes.items(), key=lambda item: min(map(int, item[1]))):
        before = _alternatives(starts)
        parts.append((f"(?:{before})" if "|" in before else before) + digit_class)
    return "|".join(parts)


def _digit_class(digits: set[str]) -> str:
    """A set of digits as a regex: '7', '[25]', '[3-9]'. Never a range with further digits, as `[0-24]` reads like 0 to 24."""
    inside = "".join(sorted(digits))
    if len(inside) == 1:
        return inside
    if len(inside) > 2 and int(inside[-1]) - int(inside[0]) == len(inside) - 1:
        inside = f"{inside[0]}-{inside[-1]}"
    return f"[{inside}]"
