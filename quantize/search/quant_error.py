"""The types that a tensor can get, and the error of each on sampled rows."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING

from ...formats import TYPES, PlanError, SourceTensor, TensorType
from ...operating_system.processors import available_cpus
from ..encode import can_encode
from ..importance import Importance
from ..recipes.loader_types import LoaderTypes
from ..recipes.type_selection import plain_for_lookup
from .row_sample import sample_rows

if TYPE_CHECKING:
    from ..covariance.source import Covariances

_LOOK = 0.1  # seconds between two looks at what is done of tensors

# What a search selects from by default: types with a low error for their size whose matrix products run at full speed.
DEFAULT_TYPES = (
    *("iq1_s", "iq1_m", "iq2_xxs", "iq2_ks", "iq2_k", "iq2_kl", "iq3_ks", "iq3_k", "iq4_kss", "iq4_ks", "iq4_k"),
    *("iq5_ks", "iq5_k", "iq6_k", "q8_0", "iq4_nl", "q5_0", "q6_0"),
)


def usable_types(
    tensor: SourceTensor, types: Sequence[TensorType], has_importance: bool, program: str | None = None
) -> list[TensorType]:
    """The types of a set that a tensor can get, smallest first. program: that is to load the file; None: any.

    A type that does not fit the tensor's shape is replaced by its fallback; one that needs importance is left out where there
    is none. Raises PlanError when nothing is left.
    """
    usable: dict[str, TensorType] = {}
    fallbacks = LoaderTypes(program).fallbacks
    for requested in types:
        try:
            tensor_type, _ = TYPES.fallback_for(plain_for_lookup(tensor, requested), tensor.shape, fallbacks)
        except PlanError:
            continue
        if can_encode(tensor_type) and (has_importance or not TYPES.imatrix_need(tensor_type)):
            usable[tensor_type.name] = tensor_type
    if not usable:
        raise PlanError(f"none of the types allowed can hold {tensor.name}: allow q8_0 too, which needs no importance data")
    return sorted(usable.values(), key=lambda t: (t.nbytes(tensor.shape), t.name))


def relative_errors(
    tensors: Mapping[str, SourceTensor],
    options: Mapping[str, Sequence[TensorType]],
    importance: Importance | None,
    known: Mapping[str, Mapping[str, float]],
    *,
    rows: int,
    seed: int,
    covariances: Covariances | None = None,
    threads: int | None = 1,
    on_share: Callable[[float], None] = lambda share: None,
) -> Generator[tuple[str, dict[str, float]], None, None]:
    """(tensor name, {type name: error}) for each tensor in `options` and its types, in this order; errors are
    those of `RowSample.errors`.

    known: errors from an earlier run, which are not computed again. rows, seed, covariances: as in `sample_rows`. threads: that
    many tensors at a time, None: as many as there are processors; the errors do not depend on it. on_share: called, by the
    thread that iterates, with how much of the next tensors is done, in tensors: types of a first one may have to be compiled.
    """
    shares: dict[str, float] = {}

    def measure(name: str, types: Sequence[TensorType], on_share: Callable[[float], None]) -> dict[str, float]:
        errors = dict(known.get(name, {}))
        missing = [t for t in types if t.name not in errors]
        if missing:
            sample = sample_rows(tensors[name], importance, rows, seed, covariances)
            errors |= sample.errors(missing, on_share)
        return {t.name: errors[t.name] for t in types}

    count = threads or available_cpus()
    if count == 1:
        for name, types in options.items():
            yield name, measure(name, types, on_share)
        return
    pool = ThreadPoolExecutor(count)
    try:
        futures = [
            (name, pool.submit(measure, name, types, partial(shares.__setitem__, name))) for name, types in options.items()
        ]
        for name, future in futures:
            told = 0.0
            while not wait([future], _LOOK).done:
                if (share := sum(list(shares.values()))) > told:
                    on_share(told := share)
            shares.pop(name, None)
            yield name, future.result()
    finally:
        pool.shutdown(cancel_futures=True)
