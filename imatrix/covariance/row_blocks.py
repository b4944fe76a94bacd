"""How the rows of a matrix are divided into blocks, each of which has its own second moments of gradients.

Second moments of all rows of a matrix are rows squared numbers, of 18,432 rows 340 million. So the rows are divided into as
many equal blocks as are needed for none to have more than a limit. Where one matrix has the rows of several heads, blocks do
not reach from one head into the next.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import PlanError

ROWS = 1024  # of a block, unless another number is given


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


def row_blocks(rows: int, run: int, limit: int) -> RowBlocks:
    """Equal blocks of at most `limit` rows of each run. Raises PlanError for a limit below 1."""
    if limit < 1:
        raise PlanError(f"blocks of {limit} rows for second moments of gradients: at least 1")
    return RowBlocks(rows, run, -(-run // -(-run // limit)))
