"""A part of the files of a planned split: machines that share nothing divide a job, and each writes its own files.

The plan is that of the whole job, so every machine plans the same headers and offsets, and its files have the bytes that they
would have had from one machine. Each file holds a digest of the plan (`PLAN_KEY`); reading a split refuses files of another.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from dataclasses import replace

import numpy as np

from ..errors import PlanError
from .outputs import Locations
from .plan import Plan

_LARGEST = 100_000


def parse_ranges(text: str, what: str, example: str) -> list[int]:
    """'3,7-9' -> [3, 7, 8, 9]. Raises PlanError for any other syntax.

    what: the numbers are of; example: a list as it should be; both for messages.
    """
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match is not None else (1, 0)
        if last < first or last > _LARGEST:
            raise PlanError(f"{text!r} is no list of {what}; write for example {example}")
        numbers.update(range(first, last + 1))
    return sorted(numbers)


def parse_shards(text: str) -> list[int]:
    """Numbers of files as in their names, from 1: '1,4,6-9' -> [1, 4, 6, 7, 8, 9]. Raises PlanError."""
    numbers = parse_ranges(text, "files of a split", "1,4,6-9")
    if numbers[0] == 0:
        raise PlanError(f"{text!r}: the files of a split are counted from 1, as in their names")
    return numbers


def without_files(plan: Plan, existing: Collection[int]) -> Plan:
    """The plan with the tensors of all files but these, by their indexes."""
    kept = np.flatnonzero(~np.isin(plan.locations.files, list(existing)))
    locations = Locations(plan.locations.files[kept], plan.locations.offsets[kept])
    return replace(plan, outputs=plan.outputs.take(kept), locations=locations)


def only_shards(plan: Plan, numbers: Collection[int]) -> Plan:
    """The plan of some files of a split alone, numbers counted from 1; each file is as the whole plan has it.

    Raises PlanError if the plan has one file, or fewer.
    """
    count = len(plan.files)
    if count == 1:
        raise PlanError("--only-shards: the output is one file; say how it is split (--split-max-size, --split-max-tensors)")
    outside = [number for number in sorted(numbers) if not 1 <= number <= count]
    if outside:
        raise PlanError(f"--only-shards: there is no file {outside[0]}; the output is split into files 1 to {count}")
    chosen = sorted(number - 1 for number in numbers)
    kept = np.flatnonzero(np.isin(plan.locations.files, chosen))
    return replace(
        plan,
        outputs=plan.outputs.take(kept),
        locations=Locations(np.searchsorted(chosen, plan.locations.files[kept]), plan.locations.offsets[kept]),
        files=[plan.files[i] for i in chosen],
        make_fingerprint=lambda: hashlib.sha256(f"{plan.fingerprint} {chosen}".encode()).hexdigest()[:32],
    )
