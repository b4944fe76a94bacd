"""Chat templates and conversations: messages become prompt text by the model's own template, and turns share one KV cache.

A template is a program that came with a file from somewhere: it runs in a sandbox, in a process of its own, and gets plain
data only.

Built-in templates, for models whose metadata has none, are the prompt formats of well-known families: a Jinja template is
made from each `TurnFormat`. Where a family has no system role, the system message is put in front of the first user message,
as the family's own template does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...data_classes import dataclass
from ...formats import MillError, PlanError
from ..generation.generate import Generation, generate
from ..model import Model
from . import template_process
from .tokenizer import Tokenizer
from .vocabulary import Vocabulary


@dataclass(frozen=True)
class TurnFormat:
    """The text of one message of each role; '@' stands for its content.

    generation_prompt  text that starts the assistant's answer
    system             None: the family has no system role
    prefix             text at the beginning of the prompt; 'BOS' stands for the BOS token
    strip              white space around a message's content is removed
    """

    user: str
    assistant: str
    generation_prompt: str
    system: str | None = None
    prefix: str = ""
    strip: bool = False

    @property
    def jinja(self) -> str:
        """The format as a Jinja template."""
        content = "(message.content | trim)" if self.strip else "message.content"

        def output(format: str, value: str) -> str:
            before, after = format.split("@")
            return f"{{{{ {before!r} + {value} + {after!r} }}}}"

        if self.system is None:
            system = f"{{% set pending.system = {content} + '\\n\\n' %}}"
            user = output(self.user, f"pending.system + {content}") + "{% set pending.system = '' %}"
        else:
            system, user = output(self.system, content), output(self.user, content)
        return (
            f"{{{{ {self.prefix!r} | replace('BOS', bos_token) }}}}"
            "{% set pending = namespace(system='') %}{% for message in messages %}"
            f"{{% if message.role == 'system' %}}{system}"
            f"{{% elif message.role == 'user' %}}{user}"
            f"{{% elif message.role == 'assistant' %}}{output(self.assistant, content)}"
            "{% else %}{{ raise_exception('this template knows no role ' + message.role) }}{% endif %}{% endfor %}"
            f"{{% if add_generation_prompt %}}{{{{ {self.generation_prompt!r} }}}}{{% endif %}}"
        )


_FORMATS: dict[str, TurnFormat] = {
    "alpaca": TurnFormat("### Instruction:\n@\n\n", "@\n\n", "### Response:\n", system="@\n\n"),
    "chatml": TurnFormat(
        "<|im_start|>user\n@<|im_end|>\n",
        "<|im_start|>assistant\n@<|im_end|>\n",
        "<|im_start|>assistant\n",
        system="<|im_start|>system\n@<|im_end|>\n",
    ),
    "deepseek": TurnFormat("<｜User｜>@", "<｜Assistant｜>@<｜end▁of▁sentence｜>", "<｜Assistant｜>", system="@", prefix="BOS"),
    "gemma": TurnFormat(
        "<start_of_turn>user\n@<end_of_turn>\n",
        "<start_of_turn>model\n@<end_of_turn>\n",
        "<start_of_turn>model\n",
        prefix="BOS",
        strip=True,
    ),
    "glm4": TurnFormat("<|user|>\n@", "<|assistant|>\n@", "<|assistant|>", system="<|system|>\n@", prefix="[gMASK]<sop>"),
    "llama3": TurnFormat(
        "<|start_header_id|>user<|end_header_id|>\n\n@<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n@<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        system="<|start_header_id|>system<|end_header_id|>\n\n@<|eot_id|>",
        prefix="BOS",
        strip=True,
    ),
    "mistral": TurnFormat("[INST] @[/INST]", " @</s>", "", prefix="BOS"),
    "phi3": TurnFormat("<|user|>\n@<|end|>\n", "<|assistant|>\n@<|end|>\n", "<|assistant|>\n", system="<|system|>\n@<|end|>\n"),
    "vicuna": TurnFormat("USER: @\n", "ASSISTANT: @</s>\n", "ASSISTANT:", system="@\n\n"),
    "zephyr": TurnFormat("<|user|>\n@</s>\n", "<|assistant|>\n@</s>\n", "<|assistant|>\n", system="<|system|>\n@</s>\n"),
}

BUILT_IN: dict[str, str] = {name: format.jinja for name, format in _FORMATS.items()}


Message = dict[str, Any]

# variable of a template -> NAME of the key tokenizer.ggml.NAME_token_id (the misspelling is GGUF's)
_SPECIAL_TOKENS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",
    "mask_token": "mask",
}
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")  # of a message; the first that it has is taken


class ChatTemplate:
    """A Jinja chat template with the semantics of transformers' apply_chat_template."""

    def __init__(self, text: str, special_tokens: Mapping[str, str] | None = None, name: str = "chat template"):
        """Compiles the template. Raises PlanError if it is not valid.

        text: Jinja source; special_tokens: variables such as bos_token; name: how error messages call it.
        """
        self.text, self.name, self.special_tokens = text, name, dict(special_tokens or {})
        self._run(None)

    def render(self, /, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        """Returns the prompt text of a conversation.

        messages: dicts with 'role' and 'content' (text), and whatever else the template knows (plain JSON values only);
        add_generation_prompt: end with the text that starts the assistant's answer; variables: others that the template reads,
        such as tools or enable_thinking. Raises PlanError when the template refuses the messages or fails.
        """
        defaults = {"tools": None, "documents": None, **self.special_tokens}
        named = [_with_reasoning_names(message) for message in messages]
        return self._run({"messages": named, "add_generation_prompt": add_generation_prompt, **defaults, **variables})

    def _run(self, variables: Mapping[str, Any] | None) -> str:
        """Renders the template; without variables it is only compiled. Raises PlanError."""
        result = template_process.run_template(self.text, variables)
        if "text" in result:
            return result["text"]
        error, message = result["error"], result["message"]
        if error == "syntax":
            raise PlanError(f"the {self.name} is not valid: line {result['line']}: {message}")
        if error == "refused":
            raise PlanError(f"the {self.name} does what a template must not: {message}")
        if variables is None:
            raise PlanError(f"the {self.name} is not valid: {message}")
        reason = message if error == "template" else f"{error}: {message}"
        raise PlanError(f"the {self.name} cannot write these messages: {reason}")


def _with_reasoning_names(message: Message) -> Message:
    """The message with its reasoning under each name that templates read it by, as in transformers: `thinking` (gpt-oss, LFM2)
    and `reasoning_content` (most others)."""
    reasoning = next((message[name] for name in _REASONING_NAMES if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def find_template(metadata: Mapping[str, Any], choice: str | None = None) -> ChatTemplate:
    """Returns the chat template to use for a model with this GGUF metadata.

    choice: None for the model's own (tokenizer.chat_template), the name of another one that it carries
    (tokenizer.chat_template.NAME) or of a built-in one (`chat_templates.BUILT_IN`), or Jinja text (recognised by its '{').
    Raises PlanError if there is none, or none of that name.
    """
    special_tokens = _special_token_texts(metadata)
    own, named = metadata.get("tokenizer.chat_template"), _named_templates(metadata)
    if choice is None:
        if isinstance(own, str) and own.strip():
            return ChatTemplate(own, special_tokens, "model's chat template")
        also = f"; it carries the named ones {', '.join(named)}" if named else ""
        raise PlanError(
            f"the model has no chat template{also}; choose one (--template FILE, or one of {', '.join(BUILT_IN)}) that fits it"
        )
    if "{" in choice:
        return ChatTemplate(choice, special_tokens)
    for templates in (named, BUILT_IN):
        if choice in templates:
            return ChatTemplate(templates[choice], special_tokens, f"chat template {choice}")
    raise PlanError(f"there is no chat template {choice!r} (known: {', '.join([*named, *BUILT_IN])})")


def _named_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template."
    return {
        key.removeprefix(prefix): text for key, text in metadata.items() if key.startswith(prefix) and isinstance(text, str)
    }


def _special_token_texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens; bos_token and eos_token are always defined, as templates use them without asking."""
    texts = {"bos_token": "", "eos_token": ""}
    if "tokenizer.ggml.tokens" in metadata:
        vocabulary = Vocabulary(metadata)
        for variable, name in _SPECIAL_TOKENS.items():
            id = vocabulary.special_id(name)
            if id is not None:
                texts[variable] = vocabulary.tokens[id]
    return texts


def prompt_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a rendered prompt. BOS is added in front only if the model wants it and the template left it out."""
    ids = tokenizer.encode(text, add_special=False, parse_special=True)
    if tokenizer.add_bos and tokenizer.bos is not None and ids[:1] != [tokenizer.bos]:
        ids.insert(0, tokenizer.bos)
    return ids


class Conversation:
    """A conversation with a model; the KV cache of the turns so far is reused.

    messages    all messages of the context, the system message among them
    n_dropped   messages that were dropped from the beginning because the context was full
    generation  the answer under way, or the last one
    """

    def __init__(self, model: Model, template: ChatTemplate, system: str | None = None, n_predict: int = -1, **sampling: Any):
        """n_predict: largest number of tokens of an answer, -1: as many as fit; sampling: fields of `Sampling` by name."""
        self.model, self.template, self.n_predict, self.sampling = model, template, n_predict, sampling
        self.session = model.session()
        self.generation: Generation | None = None
        self.n_dropped = 0
        self.system = system
        self.reset()

    def reset(self) -> None:
        """Drops all messages except the system message."""
        self.messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        self.n_dropped = 0

    def answer(self, text: str) -> Iterator[str]:
        """Yields the answer to a message piece by piece. What was yielded of a cancelled or abandoned answer is kept.

        Raises PlanError when the template refuses the messages, MillError when the message alone does not fit into the context;
        the conversation then is as it was before.
        """
        messages_before, dropped_before = list(self.messages), self.n_dropped
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            ids = self._prompt()
            self.generation = generate(self.model, ids, n_predict=self.n_predict, session=self.session, **self.sampling)
            for piece in self.generation:
                pieces.append(piece)
                yield piece
        except MillError:
            self.messages, self.n_dropped = messages_before, dropped_before
            raise
        finally:
            if self.messages is not messages_before:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})

    def cancel(self) -> None:
        """Ends the answer under way; may be called from a signal handler."""
        if self.generation is not None:
            self.generation.cancel()

    def _prompt(self) -> list[int]:
        """Token ids of all messages, after dropping as many of the oldest turns as an answer needs space for.

        An answer gets n_predict tokens, at most a quarter of the context.
        """
        n_reserved = self.session.n_ctx // 4
        if 0 <= self.n_predict < n_reserved:
            n_reserved = self.n_predict
        while True:
            ids = prompt_tokens(self.model.tokenizer, self.template.render(self.messages))
            turn_starts = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
            if len(ids) + n_reserved <= self.session.n_ctx or len(turn_starts) < 2:
                break
            self.n_dropped += turn_starts[1] - turn_starts[0]
            del self.messages[turn_starts[0] : turn_starts[1]]
        if len(ids) >= self.session.n_ctx:
            raise MillError(f"the message does not fit: {len(ids)} tokens into a context of {self.session.n_ctx} (-c sets it)")
        return ids
