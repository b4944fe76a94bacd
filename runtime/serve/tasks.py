"""What the engine is given, prompts to be continued, and the events that it reports of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import field
from typing import Any

from ...data_classes import dataclass
from ..generation.generate import Timings
from ..generation.sampling import SampledToken

origin: ContextVar[str] = ContextVar("origin", default="")  # client, method and path of the request that is answered


@dataclass(frozen=True)
class TextEvent:
    """A piece of an answer. sampled: the tokens since the last event, if their probabilities were asked for; slot: number of
    the slot that it is generated in."""

    text: str
    sampled: list[SampledToken]
    slot: int = -1


@dataclass(frozen=True)
class PromptEvent:
    """The probabilities of the tokens of a prompt from the second one on, for a task with the option score_prompt."""

    scores: list[SampledToken]


@dataclass(frozen=True)
class EndEvent:
    """The end of an answer.

    reason  that of the `Generation`, as its stop_text; ending: its token
    error   the exception that ended it, or None
    slot    number of the slot that it was generated in; -1: none
    origin  of the task; only in what the engine's `on_end` gets
    """

    reason: str = ""
    sampled: list[SampledToken] = field(default_factory=list)
    ending: SampledToken | None = None
    timings: Timings = field(default_factory=Timings)
    error: Exception | None = None
    stop_text: str = ""
    slot: int = -1
    origin: str = ""

    @property
    def was_cut(self) -> bool:
        """Whether a limit ended the answer, and not the model or a stop text."""
        return self.reason in ("length", "context")


Event = TextEvent | PromptEvent | EndEvent


@dataclass(eq=False)
class Task:
    """A prompt to be continued. Several tasks may have the same list as their prompt: it is then read once.

    options   keyword arguments of `generate`
    notify    called by the engine's thread with the PromptEvent if there is one, each TextEvent, and the EndEvent
    reported  the engine calls its `on_end` for this task
    slot      number of the slot that it waits for; one that the engine does not have, or -1: any
    origin    client, method and path of the request
    """

    prompt: list[int]
    options: dict[str, Any]
    notify: Callable[[Event], None]
    reported: bool = True
    cancelled: bool = False
    slot: int = -1
    origin: str = field(default_factory=origin.get)

    def cancel(self) -> None:
        """Ends the task after the pass under way, or before it has started. May be called from any thread."""
        self.cancelled = True


@dataclass
class Counts:
    """What an engine has done. passes: through the model; busy_slots: slots with a task, summed over passes; longest: tokens of
    the longest sequence."""

    passes: int = 0
    busy_slots: int = 0
    longest: int = 0


@dataclass(frozen=True)
class SlotState:
    """A slot of an engine: the tokens that its session holds, whether a task runs in it, and of its last task the number
    (counted from 1; 0: it had none), the options, the timings, and how many tokens it may still generate (-1: no limit)."""

    n_tokens: int = 0
    is_processing: bool = False
    task: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    timings: Timings = field(default_factory=Timings)
    remaining: int = -1
