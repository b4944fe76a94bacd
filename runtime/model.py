"""A model that is loaded: tokens run through it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..formats import MillError, PlanError, TensorSource
from ..simd.compile.compile_time import compiling_for
from ..simd.workers import Workers
from .backends import Cache, Executable, PassInputs
from .draft_head import DraftHead
from .finite_check import FiniteCheck
from .graph import Graph, Observer
from .graph.observer import ObserverGroup
from .graph.values import StateSpec
from .micro_batches import PIECE, divide_passes, wanted_rows
from .models.architectures import build_draft_graphs
from .placement.device_placement import DevicePlacement
from .placement.mapped_files import MappedFiles
from .session import Session as Session
from .settings import Settings
from .text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from .generation.generate import Generation


class Model:
    """A model that is ready to run.

    source        its tensors as they are used
    stored        the same as they are in the file: not interleaved when it was loaded
    graph         what it computes
    executable    what computes it
    settings      those it was loaded with
    packed_bytes  memory taken by weights that were interleaved when it was loaded
    files         those that its weights are read from
    placed        what of it lies on which device; None: all of it is in the machine's memory
    notes         what the user should know of how it runs, one line each
    on_windows    called within `hidden` with how many of the sequences are done, a fraction after each layer; None: nobody is
    """

    on_windows: Callable[[float], None] | None = None

    def __init__(
        self,
        source: TensorSource,
        executable: Executable,
        settings: Settings,
        stored: TensorSource,
        packed_bytes: int,
        notes: Sequence[str] = (),
        compile_draft: Callable[[Graph], Executable] | None = None,
        placed: DevicePlacement | None = None,
    ):
        """compile_draft: compiles the graph of a draft layer, over the same weights."""
        self.placed = placed
        self._compile_draft = compile_draft
        self.source, self.executable, self.settings = source, executable, settings
        self.graph: Graph = executable.graph
        self.stored, self.packed_bytes, self.notes = stored, packed_bytes, notes
        self.files = MappedFiles(source.files)

    def __repr__(self) -> str:
        return f"<Model {self.source.path}: {self.source.architecture}, {self.n_layers} layers, vocabulary of {self.n_vocab}>"

    @property
    def metadata(self) -> dict[str, Any]:
        return self.source.metadata

    @property
    def n_vocab(self) -> int:
        """Tokens that have a logit."""
        return self.graph.n_vocab

    @property
    def n_embeddings(self) -> int:
        """Tokens that have an embedding, and so can be read."""
        return self.graph.embedding.shape[1]

    @property
    def n_layers(self) -> int:
        """Layers that are run."""
        return len(self.graph.layers)

    @property
    def is_recurrent(self) -> bool:
        """Whether layers keep a recurrent state: then a sequence can only go back to where its cache has a checkpoint."""
        return any(isinstance(spec, StateSpec) for spec in self.graph.cache)

    @property
    def has_head(self) -> bool:
        """Whether it predicts tokens; encoders do not."""
        return self.graph.logits is not None

    @property
    def n_ctx_train(self) -> int:
        """The context length that it was trained for."""
        return self.graph.n_ctx_train

    @property
    def n_ctx(self) -> int:
        """Default limit of a session's tokens."""
        return self.settings.n_ctx or self.n_ctx_train

    @property
    def device_names(self) -> list[str]:
        """The devices that it was placed on, as `-ot` names them; none where the cpu backend runs all of it."""
        return [] if self.placed is None else list(self.placed.devices)

    @property
    def workers(self) -> Workers:
        """The threads that it computes with."""
        return self.executable.workers

    @property
    def decode_batch(self) -> int:
        """Generated tokens, of one sequence or several, that a pass has at most."""
        return self.executable.decode_batch

    @property
    def short_prompt(self) -> int:
        """Tokens of a prompt up to which it is computed whole, as if they were generated."""
        return most if (most := self.executable.short_prompt) <= self.settings.ubatch else self.decode_batch

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises PlanError when the metadata has no vocabulary, or one of a kind that is not supported."""
        return Tokenizer(self.metadata)

    @cached_property
    def draft_heads(self) -> list[DraftHead]:
        """The model's draft layers (multi-token prediction), compiled when they are first asked for; none where it has none.

        Raises PlanError where those of this architecture cannot be run, FormatError for missing tensors.
        """
        if self._compile_draft is None:
            return []
        graphs = build_draft_graphs(self.source, self.settings.n_ctx)
        return [DraftHead(self, self._compile_draft(graph)) for graph in graphs]

    @property
    def observer(self) -> Observer | None:
        """What is given the inputs and outputs of ops (see `graph.observer`) in the passes from now on; None: nothing."""
        return self.executable.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self.executable.observer = observer

    @contextmanager
    def observing(self, observer: Observer) -> Iterator[None]:
        """Within this, the observer is given what ops compute, besides one that is there already."""
        before = self.observer
        self.observer = observer if before is None else ObserverGroup([before, observer])
        try:
            yield
        finally:
            self.observer = before

    def release(self) -> None:
        """Frees the memory of passes and decoded weights, which Python would do late, since they refer to each other. The model
        can still run."""
        self.executable.release()

    def embeddings(self, ids: np.ndarray) -> np.ndarray:
        """The rows of the table of embeddings: int [n] -> float32 [n, n_embd]."""
        return self.executable.embeddings(ids)

    def logits(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """One sequence from scratch: int [n] -> float32 [n, n_vocab]; row i predicts token i + 1.

        Raises PlanError for no tokens or ids that the vocabulary does not have, and for a model that predicts no tokens.
        """
        return self.head(self.hidden([(self.new_cache(len(tokens)), tokens)])[0])

    def new_cache(self, limit: int) -> Cache:
        """An empty cache for a sequence of at most `limit` tokens."""
        return self.executable.new_cache(limit)

    def session(self, n_ctx: int | None = None) -> Session:
        """A sequence to generate from, of at most n_ctx tokens (the model's own length if None).

        Raises PlanError for another n_ctx than a positive one, and for a model that only makes embeddings.
        """
        if n_ctx is not None and n_ctx < 1:
            raise PlanError(f"n_ctx has to be positive, not {n_ctx}")
        if not self.has_head:
            raise PlanError(f"{self.source.path}: {self.graph.architecture} generates no text; `ggufmill embed` uses it")
        return Session(self, n_ctx or self.n_ctx)

    def generate(self, prompt: str | Sequence[int], n_predict: int = 128, **options: Any) -> Generation:
        """Text that follows a prompt: iterate over the result to get it piece by piece, or take all of it with `.text()`.

        prompt: text or token ids; n_predict: tokens at most, -1: no limit; options: stop, ignore_eos, session and others of
        `generation.generate`, and fields of `Sampling` (temp, top_k, top_p, min_p, seed, ...). Raises as `generate` does.
        """
        from .generation.generate import generate

        return generate(self, prompt, n_predict, **options)

    def feed(self, batch: Sequence[tuple[Session, Sequence[int] | np.ndarray]], generated: bool | None = None) -> np.ndarray:
        """Appends tokens to several sessions (none twice) in one pass, which reads each weight once for all of them.

        generated: whether they are computed as generated tokens are, else as prompts (see `hidden`); None: if there is one for
        each session. Returns the logits after the last token of each, float32 [sessions, n_vocab]. Raises as `hidden` does; no
        session has then changed.
        """
        return np.concatenate(self.feed_rows([(session, tokens, 1) for session, tokens in batch], generated))

    def feed_rows(
        self, batch: Sequence[tuple[Session, Sequence[int] | np.ndarray, int]], generated: bool | None = None
    ) -> list[np.ndarray]:
        """As `feed`, with for each session the number of its last tokens whose logits are wanted: float32 [number, n_vocab]."""
        if generated is None:
            generated = all(len(tokens) == 1 for _, tokens, _ in batch)
        for session, _, _ in batch:
            session.prepare(generated)
        firsts = [session.cache.length for session, _, _ in batch]
        last = [n if session.drafter is None else None for session, _, n in batch]
        following = [(session.cache, session.missing(tokens)) for session, tokens, _ in batch]
        hidden = self.hidden(following, last, generated=generated)
        is_scored = not generated and any(n > 1 for _, _, n in batch)  # then logits do not depend on how many are wanted
        wanted = np.concatenate([rows[-n:] for rows, (_, _, n) in zip(hidden, batch, strict=True)])
        logits = self.head(wanted, not is_scored)
        for (session, tokens, _), rows, first in zip(batch, hidden, firsts, strict=True):
            session.append(tokens, generated)
            if session.drafter is not None:
                session.drafter.observe(first, rows, session.tokens)
        return np.split(logits, np.cumsum([n for _, _, n in batch])[:-1])

    def hidden_of_windows(self, windows: np.ndarray) -> list[np.ndarray]:
        """Runs sequences of equal length from scratch, int [n, n_ctx], as `hidden` does; for each float32 [n_ctx, n_embd].

        Each is computed in pieces of PIECE tokens, as many of them per pass as `settings.ubatch` permits but one at least.
        """
        return self.hidden([(self.new_cache(windows.shape[1]), window) for window in windows], in_pieces=True)

    def windows_bytes(self, count: int, n_ctx: int) -> int | None:
        """Bytes of memory that `hidden_of_windows` takes for so many windows of n_ctx tokens: those of the largest pass, of the
        results, and of caches. None: not known."""
        passes = list(self._passes([np.zeros(n_ctx, np.int64)] * count, in_pieces=True, generated=False))
        counts = [[len(tokens) for _, tokens in parts] for parts in passes]
        cache = self.executable.cache_bytes(n_ctx, sum(any(i == 0 for i, _ in parts) for parts in passes))
        in_pass = self.executable.pass_bytes(max(counts, key=sum), n_ctx)
        if cache is None or in_pass is None:
            return None
        return in_pass + count * (4 * n_ctx * self.graph.n_embd + cache)

    def hidden(
        self,
        batch: Sequence[tuple[Cache, Sequence[int] | np.ndarray]],
        last: Sequence[int | None] | None = None,
        *,
        in_pieces: bool = False,
        generated: bool = False,
    ) -> list[np.ndarray]:
        """Runs the next tokens of several sequences together, `settings.ubatch` tokens per pass.

        batch: each sequence's cache (no cache twice) and its next tokens. Returns for each the value `hidden` of the graph,
        float32 [n, n_embd], from which `head` makes logits. Raises PlanError as `logits` does, MillError when a cache is full
        or a file of the model has been cut. Whatever is raised, the caches are then as they were before. Before more than one
        token, recurrent states become checkpoints. last: how many of each one's last rows are wanted, if not all (None): others
        may be missing. in_pieces: see `hidden_of_windows`.

        generated: the tokens are computed by the kernels for tokens that are generated, as many per pass as these take, else by
        those for prompts. The two add up in different orders, and -mla 3 in different ways. With the cpu backend the results of
        a token depend on nothing else: neither on what the passes are, nor on other sequences; but the first tokens of a
        sequence, more than `decode_batch` and at most `short_prompt`, are a prompt with a pass and sums of its own. `logits`
        and `hidden_of_windows` compute prompts.
        """
        self.files.check()
        arrays = [self._checked(tokens) for _, tokens in batch]
        for (cache, _), tokens in zip(batch, arrays, strict=True):
            self._check_length(cache.length, len(tokens))
            cache.check_capacity(len(tokens))
            if len(tokens) > 1:
                cache.checkpoint()
        before = [cache.length for cache, _ in batch]
        try:
            with self.workers.placed(), compiling_for(self.graph.architecture):
                return self._hidden(batch, arrays, last or [None] * len(batch), in_pieces, generated)
        except BaseException:  # an interruption, too
            for (cache, _), length in zip(batch, before, strict=True):
                cache.truncate(length)
            raise

    def _hidden(
        self,
        batch: Sequence[tuple[Cache, Sequence[int] | np.ndarray]],
        arrays: list[np.ndarray],
        last: Sequence[int | None],
        in_pieces: bool,
        generated: bool,
    ) -> list[np.ndarray]:
        """As `hidden`, with the tokens of each sequence as an array."""
        out: list[list[np.ndarray]] = [[] for _ in batch]
        short = range(self.decode_batch + 1, self.short_prompt + 1) if generated else ()
        whole = [i for i, (cache, _) in enumerate(batch) if not cache.length and len(arrays[i]) in short]
        parts_of = [[(i, arrays[i])] for i in whole]
        rest = [tokens[:0] if i in whole else tokens for i, tokens in enumerate(arrays)]
        parts_of += self._passes(rest, in_pieces, generated) if any(map(len, rest)) or not whole else []
        passes: list[PassInputs] = []
        for parts in parts_of:
            joined = parts[0][1] if len(parts) == 1 else np.concatenate([tokens for _, tokens in parts])
            passes.append((joined, [(batch[i][0], len(tokens)) for i, tokens in parts], None))
        in_turn = self._takes_layers_in_turn(arrays)
        lengths = [[(i, len(tokens)) for i, tokens in parts] for parts in parts_of]
        wanted = wanted_rows(lengths, list(map(len, arrays)), [None] * len(batch) if in_turn else last)
        report = self.on_windows
        if in_turn:
            self.executable.on_share = None if report is None else lambda share: report(share * len(batch))
            results: Iterable[np.ndarray] = self.executable.hidden_passes(passes)
        else:
            results = self._each_pass(passes, wanted, generated, report, len(batch) / len(passes))
        for parts, counts, result in zip(parts_of, wanted, results, strict=True):
            row = 0
            for (i, _), count in zip(parts, counts, strict=True):
                out[i].append(result[row : row + count])
                row += count
        return [pieces[0] if len(pieces) == 1 else np.concatenate(pieces) for pieces in out]

    def _each_pass(
        self,
        passes: Sequence[PassInputs],
        wanted: Sequence[Sequence[int]],
        generated: bool,
        report: Callable[[float], None] | None,
        windows: float,
    ) -> Iterator[np.ndarray]:
        """wanted: of each pass, of how many of each sequence's last tokens; windows: of each pass, for `report`."""
        for i, (inputs, last) in enumerate(zip(passes, wanted, strict=True)):
            self.executable.on_share = None if report is None else lambda share, i=i: report((i + share) * windows)
            yield self.executable.hidden(*inputs, generated=generated, last=last)

    def _takes_layers_in_turn(self, arrays: Sequence[np.ndarray]) -> bool:
        """Whether each layer runs over all passes before the next: where its weights are copied to a device for each visit, and
        no sequence is divided among passes."""
        takes = self.executable.takes_layers_in_turn
        return takes and max(map(len, arrays), default=0) <= self.settings.ubatch

    def _passes(self, arrays: Sequence[np.ndarray], in_pieces: bool, generated: bool) -> Iterator[list[tuple[int, np.ndarray]]]:
        """The tokens of sequences divided into passes: of each the numbers of sequences and their next tokens."""
        is_whole = not self.graph.is_causal or self._takes_layers_in_turn(arrays)
        piece = None if is_whole else PIECE if in_pieces else 1
        most = min(self.settings.ubatch, self.decode_batch) if generated else self.settings.ubatch
        for parts in divide_passes([len(tokens) for tokens in arrays], most, piece):
            yield [(i, arrays[i][start:stop]) for i, start, stop in parts]

    def head(self, hidden: np.ndarray, generated: bool | None = None) -> np.ndarray:
        """float32 [n, n_embd] from `hidden` -> logits float32 [n, n_vocab]. generated: as for `hidden`; None: where there are
        at most `decode_batch` rows."""
        step = self.decode_batch if generated else max(1, len(hidden))
        with self.workers.placed(), compiling_for(self.graph.architecture):
            parts = [self.executable.logits(hidden[at : at + step], generated) for at in range(0, max(1, len(hidden)), step)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def explain_nonfinite(self, tokens: Sequence[int] | np.ndarray) -> MillError:
        """The error of `first_nonfinite`, or one that says that a second run was finite."""
        missing = f"{self.source.path}: logits were not finite, but a second run of the same tokens was"
        return self.first_nonfinite(tokens) or MillError(missing)

    def first_nonfinite(self, tokens: Sequence[int] | np.ndarray) -> MillError | None:
        """Runs the sequence again, looking at what every op computes; the error names the first weight or layer at fault."""
        before, self.observer = self.observer, FiniteCheck(self.source, self.new_cache(1).types)
        try:
            hidden = self.hidden([(self.new_cache(len(tokens)), tokens)])[0]
            if self.has_head:
                self.head(hidden)
        except MillError as error:
            return error
        finally:
            self.observer = before
        return None

    def _check_length(self, past: int, n: int) -> None:
        """Raises PlanError where n tokens cannot follow `past` others."""
        most = self.graph.n_positions
        if most is not None and past + n > most:
            raise PlanError(f"{self.source.path}: {past + n} tokens, but it has embeddings for {most} positions only")
        if past and not self.graph.is_causal:
            raise PlanError(f"{self.source.path}: tokens depend on later ones: a sequence has to be computed as one")

    def _checked(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        try:
            ids = np.asarray(tokens)
        except ValueError:  # lists of different lengths
            ids = np.empty(0, object)
        if ids.size and ids.dtype.kind not in "iu":
            raise PlanError(f"tokens have to be whole numbers, not {tokens!r:.60}")
        if ids.ndim != 1 or not len(ids):
            raise PlanError(f"tokens have to be a list of at least one id, not an array of shape {ids.shape}")
        lowest, highest = (ids[0], ids[0]) if len(ids) == 1 else (ids.min(), ids.max())
        if lowest < 0 or highest >= self.n_embeddings:
            wrong = ids[(ids < 0) | (ids >= self.n_embeddings)][0]
            raise PlanError(f"token id {wrong} is outside the vocabulary of {self.n_embeddings}")
        return ids.astype(np.int64)
