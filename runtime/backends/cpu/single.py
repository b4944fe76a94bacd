"""The pass of a single token through all layers as one program for the team of threads: what generation runs, token by token.

Between two products of a token Python takes as long as a thread takes for a hundred kilobytes of weights; on small models that
adds up to a fifth of the time. So the stages of all layers are written down once, with the addresses of everything that they
read and write, by the parts that the layers themselves would run, in the same order: the numbers are the same.

Layers of kinds that no function here writes down, or with options that it does not know, caches of types in blocks and passes
that somebody observes take the usual way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from .decoder import Decoder
from .feedforward import FusedFeedForward, GatedFeedForward, PlainFeedForward
from .grouped import GroupedAttention
from .kv_cache import KVCache
from .latent import LatentAttention
from .moe import MixtureOfExperts
from .program import Program, UnknownError, check_known
from .single_attention import grouped
from .single_blocks import dense, mixture
from .single_latent import latent
from .writer import Task

_FIELDS = {"attn_norm", "attention", "ffn_norm", "feed_forward", "attn_post", "ffn_post", "scale", "parallel"}
# (program, number of the layer, part, norm in front of it, float32 [n_embd] for its result) -> what is still to be done to that
_Write = Callable[[Program, int, Any, Any, np.ndarray], list[Task]]
_WRITE: dict[type, _Write] = {
    GroupedAttention: grouped,
    LatentAttention: latent,
    MixtureOfExperts: mixture,
    GatedFeedForward: dense,
    FusedFeedForward: dense,
    PlainFeedForward: dense,
}


class Single:
    """The layers of a decoder, for single tokens."""

    def __init__(self, decoder: Decoder):
        self._decoder, self._lock = decoder, threading.Lock()
        self._program: Program | None = None
        self._tried = False

    def __call__(self, x: np.ndarray, cache: KVCache) -> bool:
        """x float32 [1, n_embd], overwritten with the last layer's output; the cache gets the token's rows, not yet committed.

        False, and nothing done, where that cannot be, or another thread is at it.
        """
        decoder, store = self._decoder, self._decoder.store
        if store.observer is not None or store.watch or decoder.on_layer or not self._lock.acquire(blocking=False):
            return False
        try:
            if not self._tried:
                self._tried = True
                with suppress(UnknownError):
                    self._program = _written(decoder)
            return self._program is not None and self._program.run(x, cache)
        finally:
            self._lock.release()


def _written(decoder: Decoder) -> Program:
    program = Program(decoder)
    added = [program.room(program.x.size) for _ in range(2)]  # by the attention and by the feed-forward block
    for number, block in enumerate(decoder.blocks):
        check_known(block, _FIELDS)
        attended = _part(program, number, block.attention, block.attn_norm, added[0])
        attended += _to_be_added(program, added[0], block.attn_post, block.scale)
        if not block.parallel:
            program.mend, attended = attended, []
        fed_forward = _part(program, number, block.feed_forward, block.ffn_norm, added[1])
        program.mend = [*attended, *fed_forward, *_to_be_added(program, added[1], block.ffn_post, block.scale)]
    program.finish()
    return program


def _part(program: Program, number: int, part: Any, norm: Any, out: np.ndarray) -> list[Task]:
    write = _WRITE.get(type(part))
    if write is None:
        raise UnknownError(type(part).__name__)
    return write(program, number, part, norm, out)


def _to_be_added(program: Program, added: np.ndarray, post: Any, scale: float) -> list[Task]:
    """Adds what a part made to x, after a norm if it has one."""
    at, size = added.ctypes.data, added.size
    tasks = [] if post is None else program.normalised(post, at, at, 1, size)
    factors = None if scale == 1 else program.hold(np.array([scale], np.float32))
    return [*tasks, program.add(added, program.x.ctypes.data, size, factors)]
