"""How the tokens of sequences are divided into passes through the layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

PIECE = 2048  # tokens of a window that are computed at once where results must not depend on the size of micro-batches


def divide_passes(lengths: Sequence[int], ubatch: int, piece: int | None) -> Iterator[list[tuple[int, int, int]]]:
    """The tokens of sequences of these lengths, `ubatch` per pass: of each pass (number of the sequence, start, stop).

    piece: tokens that stay together: a sequence is only divided between pieces, counted from its beginning, and a pass has no
    two of one sequence, but one at least of some; None: the whole sequence; 1: a pass takes as many as there is room for.
    """
    if piece in (None, 1) and sum(lengths) <= ubatch:
        yield [(i, 0, length) for i, length in enumerate(lengths) if length]
        return
    done = [0] * len(lengths)
    while any(done[i] < length for i, length in enumerate(lengths)):
        left, parts = ubatch, list[tuple[int, int, int]]()
        for i, length in enumerate(lengths):
            rest = length - done[i]
            take = min(left, rest)
            if piece != 1:
                take = rest if piece is None else min(piece, rest)
                take = take if take <= left or not parts else 0
            if take:
                parts.append((i, done[i], done[i] + take))
                left = max(0, left - take)
                done[i] += take
            if piece is not None and take < rest:  # sequence after sequence, so that tokens come in one order
                break
        yield parts


def wanted_rows(
    passes: Sequence[Sequence[tuple[int, int]]], lengths: Sequence[int], last: Sequence[int | None]
) -> list[list[int]]:
    """Of each pass, how many of the last tokens of each of its sequences are among the `last` ones (None: all) that are wanted.

    passes: of each the numbers of sequences and of their tokens; lengths: of the sequences.
    """
    out, done = [], [0] * len(lengths)
    for parts in passes:
        counts = []
        for i, n in parts:
            done[i] += n
            wanted = last[i]
            counts.append(n if wanted is None else min(n, max(0, done[i] - lengths[i] + wanted)))
        out.append(counts)
    return out
