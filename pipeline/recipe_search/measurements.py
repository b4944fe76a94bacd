"""What a search has measured, stored in a file so that it is not measured again."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ...formats import TYPES, PlanError, TensorSource, TensorType
from ...formats.file_range import read_text
from ...jobs.atomic_write import write_text
from ...jobs.code_digest import code_digest
from ...quantize.importance import Importance
from ..common.messages import note
from .options import SearchOptions

if TYPE_CHECKING:
    from ...quantize.covariance.source import Covariances

SAVE_EVERY = 5.0  # seconds


class Measurements:
    """Measurements of one model with one imatrix and covariance: errors[tensor][type], divergences[text][types] as [mean,
    standard error], and probes[text]: see `TypeSearch.probes`.

    path: the file, which is read and written; None: nothing is saved. key: see `measurements_key`; a file with another key is
    of another model. shared: the file serves other outputs too, so that one of another model is refused, not replaced. Raises
    PlanError for a file that is something else.
    """

    def __init__(self, path: Path | None, key: str, shared: bool = False):
        self.path, self.key, self._saved = path, key, time.monotonic()
        self.errors: dict[str, dict[str, float]] = {}
        self.divergences: dict[str, dict[str, list[float]]] = {}
        self.probes: dict[str, dict[str, dict[str, str]]] = {}
        if path is None or not path.exists():
            return
        try:
            state = json.loads(read_text(path))
            same = state["key"] == key
            if same:
                self.errors = {n: {t: float(e) for t, e in types.items()} for n, types in state["errors"].items()}
                divergences = state["divergences"].items()
                self.probes = {
                    n: {p: {t: TYPES[k].name for t, k in types.items()} for p, types in probes.items()}
                    for n, probes in state["probes"].items()
                }
                self.divergences = {n: {t: [float(d) for d in ds] for t, ds in types.items()} for n, types in divergences}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, OSError):
            raise PlanError(f"{path} is not what a search keeps there; remove it, or give another output") from None
        if not same and shared:
            raise PlanError(
                f"{path} is of another model, --mla-layout, imatrix, covariance, --effort, --rows, --seed or version; "
                "give another --state"
            )
        if not same:
            note(f"note: {path} is of another model, imatrix, covariance, effort, seed or version: measured again")

    def save(self, now: bool = False) -> None:
        """Writes the file; without `now` only if the last time was SAVE_EVERY seconds ago."""
        if self.path is None or (not now and time.monotonic() - self._saved < SAVE_EVERY):
            return
        measured = {"errors": self.errors, "divergences": self.divergences, "probes": self.probes}
        write_text(self.path, json.dumps({"key": self.key, **measured}))
        self._saved = time.monotonic()


def measurements_key(
    source: TensorSource, importance: Importance | None, options: SearchOptions, covariances: Covariances | None = None
) -> str:
    """A digest of all that the errors of types depend on."""
    digest = hashlib.sha256(f"{source.identity}\0{options.rows}\0{options.seed}\0{code_digest()}".encode())
    for name, tensor in source.tensors.items():  # a checkpoint's differ by --mla-layout
        digest.update(f"{name}\0{tensor.shape}\n".encode("utf-8", "surrogateescape"))
    for name, mean in sorted(importance.means.items()) if importance is not None else ():
        digest.update(name.encode() + mean.tobytes())
    if covariances is not None:
        former_names = sorted((covariances.former_names or {}).items())
        digest.update(f"{covariances.identity}\0{covariances.effort}\0{former_names}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def types_key(types: Mapping[str, TensorType]) -> str:
    """A digest of a choice of types."""
    return hashlib.sha256("\n".join(sorted(f"{n}={k.name}" for n, k in types.items())).encode()).hexdigest()[:24]
