"""How the rows of a matrix are divided into blocks, each of which has its own second moments of gradients.

Second moments of all rows of a matrix are rows squared numbers, of 18,432 rows 340 million. So the rows are divided into as
many equal blocks as are needed for none to have more than a limit. Where one matrix has the rows of several heads, blocks do
not reach from one head into the next. Blocks are encoded as a whole, so that their borders should not cut groups of rows that
a type interleaves.
"""

from __future__ import annotations

from ...data_classes import dataclass
from ...errors import PlanError

ROWS = 1024  # of a block, unless another number is given
_ALIGNMENT = 16  # of the rows of a block: the most that a type interleaves


@dataclass(frozen=True)
class RowBlocks:
    """How the rows of a matrix are divided. rows: of the matrix; run: rows that blocks are cut from, those of a head or all;
    size: rows of a block."""

    rows: int
    run: int
    size: int

    @property
    def per_run(self) -> int:
        return -(-self.run // self.size)

    @property
    def count(self) -> int:
        """Blocks of a matrix."""
        return self.rows // self.run * self.per_run

    def span(self, block: int) -> slice:
        """The rows of a block, without what it is filled up with."""
        run, at = divmod(block, self.per_run)
        first = run * self.run
        return slice(first + at * self.size, first + min((at + 1) * self.size, self.run))

    def cuts_groups(self, group: int) -> bool:
        """Whether a border lies within a group of so many rows."""
        return any(self.span(block).start % group for block in range(self.count))


def row_blocks(rows: int, run: int, limit: int) -> RowBlocks:
    """Equal blocks, or nearly so, of at most about `limit` rows of each run. Raises PlanError for a limit below 1."""
    if limit < 1:
        raise PlanError(f"blocks of {limit} rows for second moments of gradients: at least 1")
    size = -(-run // -(-run // limit))
    return RowBlocks(rows, run, min(run, -(-size // _ALIGNMENT) * _ALIGNMENT))
