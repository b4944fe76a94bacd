"""Conversations: messages to text by a model's own template, and turns that build on each other.

A template is a program that came with a file from somewhere: it runs in a sandbox, in a process of its own, and sees plain
data only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...formats import MillError, PlanError
from ..generation.generate import Generation, generate
from ..model import Model
from . import template_process as confined
from .chat_templates import BUILT_IN
from .tokenizer import Tokenizer
from .vocabulary import Vocabulary

Message = dict[str, Any]

# variable of a template -> special token of the vocabulary
_SPECIALS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",
    "mask_token": "mask",
}


class ChatTemplate:
    """A Jinja template as transformers' apply_chat_template understands it. text: its source; name: where it comes from."""

    def __init__(self, text: str, specials: Mapping[str, str] | None = None, name: str = "chat template"):
        """specials: variables such as bos_token. Raises PlanError for a template that is not valid."""
        self.text, self.name, self.specials = text, name, dict(specials or {})
        self._answer(None)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The text of a conversation.

        messages: dicts with 'role' and 'content' (text), and whatever else the template knows (plain JSON values only);
        add_generation_prompt: end with what makes the model answer; variables: others that the template asks for, such as
        tools or enable_thinking. Raises PlanError when the template refuses the messages or fails.
        """
        given = {"tools": None, "documents": None, **self.specials, **variables}
        return self._answer({"messages": list(messages), "add_generation_prompt": add_generation_prompt, **given})

    def _answer(self, variables: Mapping[str, Any] | None) -> str:
        """What the template writes; without variables it is only compiled. Raises PlanError."""
        told = confined.answer(self.text, variables)
        if "written" in told:
            return told["written"]
        kind, said = told["wrong"], told["said"]
        if kind == "syntax":
            raise PlanError(f"the {self.name} is not valid: line {told['line']}: {said}")
        if kind == "refused":
            raise PlanError(f"the {self.name} does what a template must not: {said}")
        if variables is None:
            raise PlanError(f"the {self.name} is not valid: {said}")
        raise PlanError(f"the {self.name} cannot write these messages: {said if kind == 'template' else f'{kind}: {said}'}")


def find_template(metadata: Mapping[str, Any], choice: str | None = None) -> ChatTemplate:
    """The template to use for a model with this metadata.

    choice: None for the model's own, the name of another one it carries or of a built-in one (`templates.BUILT_IN`), or a
    template itself (recognised by its '{'). Raises PlanError if there is none, or none of that name.
    """
    specials = _special_texts(metadata)
    own, named = metadata.get("tokenizer.chat_template"), _named(metadata)
    if choice is None:
        if isinstance(own, str) and own.strip():
            return ChatTemplate(own, specials, "model's chat template")
        also = f"; it carries the named ones {', '.join(named)}" if named else ""
        raise PlanError(
            f"the model has no chat template{also}; choose one (--template FILE, or one of {', '.join(BUILT_IN)}) that fits it"
        )
    if "{" in choice:
        return ChatTemplate(choice, specials)
    for templates in (named, BUILT_IN):
        if choice in templates:
            return ChatTemplate(templates[choice], specials, f"chat template {choice}")
    raise PlanError(f"there is no chat template {choice!r} (known: {', '.join([*named, *BUILT_IN])})")


def _named(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template."
    found = {key.removeprefix(prefix): text for key, text in metadata.items() if key.startswith(prefix)}
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _special_texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Those that the vocabulary names; bos_token and eos_token are always there, as templates do not ask."""
    texts = {"bos_token": "", "eos_token": ""}
    if "tokenizer.ggml.tokens" in metadata:
        vocabulary = Vocabulary(metadata)
        for variable, name in _SPECIALS.items():
            id = vocabulary.special(name)
            if id is not None:
                texts[variable] = vocabulary.tokens[id]
    return texts


def prompt_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of what a template wrote. BOS is put in front only if the model wants it and the template left it out."""
    ids = tokenizer.encode(text, add_special=False, parse_special=True)
    if tokenizer.add_bos and tokenizer.bos is not None and ids[:1] != [tokenizer.bos]:
        ids.insert(0, tokenizer.bos)
    return ids


class Conversation:
    """Turns with a model; what a new turn shares with the ones before is not computed again.

    messages   so far, the system message among them
    forgotten  messages that had to be dropped from the beginning because the context is full
    running    the answer under way or the last one
    """

    def __init__(self, model: Model, template: ChatTemplate, system: str | None = None, n_predict: int = -1, **sampling: Any):
        """n_predict: tokens of an answer at most, -1: as many as fit; sampling: fields of `Sampling` by name."""
        self.model, self.template, self.n_predict, self.sampling = model, template, n_predict, sampling
        self.session = model.session()
        self.running: Generation | None = None
        self.forgotten = 0
        self.system = system
        self.reset()

    def reset(self) -> None:
        """Forgets all turns, not the system message."""
        self.messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        self.forgotten = 0

    def answer(self, text: str) -> Iterator[str]:
        """The pieces of the answer to a message. A cancelled or abandoned answer counts as far as it got.

        Raises PlanError when the template refuses the messages, MillError when the message alone does not fit into the context;
        the conversation then is as it was before.
        """
        before, forgotten = list(self.messages), self.forgotten
        self.messages.append({"role": "user", "content": text})
        said: list[str] = []
        try:
            ids = self._fitting_prompt()
            self.running = generate(self.model, ids, n_predict=self.n_predict, session=self.session, **self.sampling)
            for piece in self.running:
                said.append(piece)
                yield piece
        except MillError:
            self.messages, self.forgotten = before, forgotten
            raise
        finally:
            if self.messages is not before:
                self.messages.append({"role": "assistant", "content": "".join(said)})

    def cancel(self) -> None:
        """Ends the answer under way; may be called from a signal handler."""
        if self.running is not None:
            self.running.cancel()

    def _fitting_prompt(self) -> list[int]:
        """Tokens of all messages; of the oldest turns as many are dropped as it takes to leave room for an answer."""
        room = self.session.n_ctx // 4
        if 0 <= self.n_predict < room:
            room = self.n_predict
        while True:
            ids = prompt_tokens(self.model.tokenizer, self.template.render(self.messages))
            turns = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
            if len(ids) + room <= self.session.n_ctx or len(turns) < 2:
                break
            self.forgotten += turns[1] - turns[0]
            del self.messages[turns[0] : turns[1]]
        if len(ids) >= self.session.n_ctx:
            raise MillError(f"the message does not fit: {len(ids)} tokens into a context of {self.session.n_ctx} (-c sets it)")
        return ids
