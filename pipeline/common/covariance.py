"""Opening a file of covariances for a model that is to be quantised with them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UsageError
from ...formats import TensorSource, dims
from ...operating_system.processors import available_cpus
from .arguments import Size
from .memory import memory_budget

if TYPE_CHECKING:
    from ...imatrix.covariance import CovarianceFile
    from ...quantize.covariance.matrix.covariance_matrix import Covariance
    from ...quantize.covariance.source import Covariances, Curvature


def load_covariances(
    path: Path,
    source: TensorSource,
    effort: int = 1,
    *,
    curvature: bool = False,
    memory: Size | None = None,
    threads: int | None = None,
    kept: int | None = None,
) -> Covariances:
    """The covariances of a file, which are read when a tensor is encoded that needs them; curvature: of the outputs too.

    memory: that they may take when they are prepared, None: half of what is free; threads: that prepare them, None: all
    processors; kept: see `prepare`

    Raises FormatError for a file that holds none, MillError if they are of another model than the source, UsageError for
    curvature that the file does not have.
    """
    from ...imatrix.covariance import open_covariance
    from ...quantize.covariance.matrix.prepared import KEPT
    from ...quantize.covariance.source import CollectedInput, Covariances, PreparedCache

    file = open_covariance(path)
    file.check(source)

    def input_of(name: str) -> CollectedInput | None:
        stored = file.input_of(name)
        if stored is None:
            return None
        return CollectedInput(stored.columns, stored.tokens, stored.nbytes // stored.matrices)

    if curvature and not file.outputs:
        raise UsageError(
            f"{path} has covariances of inputs only: `ggufmill imatrix --curvature` collects what --curvature needs"
        )
    outputs = _curvature(file, source) if curvature else None
    digest = _digest(file, curvature)
    cache = PreparedCache(
        file.covariance_of,
        memory_budget(memory),
        threads or available_cpus(),
        file.key_of,
        kept or KEPT,
        retains=kept is not None,
    )
    return Covariances(input_of, cache, digest, file.metadata(), effort, curvature=outputs)


def _curvature(file: CovarianceFile, source: TensorSource) -> Curvature:
    """That of a source whose latent attention may have the heads' rows in a stack where the file has one matrix, or the other
    way round."""
    from ...quantize.covariance.source import CollectedOutput, Curvature

    stacks = {name: dims(tensor.shape)[2] for name, tensor in source.tensors.items()}

    def output_of(name: str) -> CollectedOutput | None:
        stored = file.output_of(name, stacks.get(name))
        return CollectedOutput(stored.blocks, stored.tokens) if stored is not None else None

    def gradient_of(name: str, matrix: int, block: int) -> Covariance:
        found = file.gradient_of(name, matrix, block, stacks.get(name))
        assert found is not None  # of what `output_of` knows
        return found

    return Curvature(output_of, gradient_of, file.model.chunk_count * file.model.chunk_size)


def _digest(file: CovarianceFile, with_outputs: bool) -> str:
    """A digest of a file's data, from the checksums in it."""
    digest = hashlib.sha256()
    outputs = [one.parts for one in file.outputs.values()] if with_outputs else []
    for stored in (*file.inputs.values(), *outputs):
        digest.update("\0".join(stored.tensors).encode() + stored.tokens.tobytes() + stored.checksums.tobytes())
    return digest.hexdigest()
