"""Chat templates by name, for models whose metadata has none: how well-known families write a conversation.

Each is a row of texts around the messages, from which a Jinja template is made; '@' stands for the message. Where a family
knows no system message, it is put in front of the first question, as its own template does.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Turns:
    """begin: before everything; ask: what makes the model answer; strip: messages lose the space around them."""

    user: str
    assistant: str
    ask: str
    system: str | None = None
    begin: str = ""
    strip: bool = False

    @property
    def template(self) -> str:
        """Jinja text."""
        content = "(message.content | trim)" if self.strip else "message.content"

        def wrapped(row: str, what: str) -> str:
            before, after = row.split("@")
            return f"{{{{ {before!r} + {what} + {after!r} }}}}"

        if self.system is None:
            system = f"{{% set held.system = {content} + '\\n\\n' %}}"
            user = wrapped(self.user, f"held.system + {content}") + "{% set held.system = '' %}"
        else:
            system, user = wrapped(self.system, content), wrapped(self.user, content)
        return (
            f"{{{{ {self.begin!r} | replace('BOS', bos_token) }}}}"
            "{% set held = namespace(system='') %}{% for message in messages %}"
            f"{{% if message.role == 'system' %}}{system}"
            f"{{% elif message.role == 'user' %}}{user}"
            f"{{% elif message.role == 'assistant' %}}{wrapped(self.assistant, content)}"
            "{% else %}{{ raise_exception('this template knows no role ' + message.role) }}{% endif %}{% endfor %}"
            f"{{% if add_generation_prompt %}}{{{{ {self.ask!r} }}}}{{% endif %}}"
        )


_ROWS: dict[str, Turns] = {
    "alpaca": Turns("### Instruction:\n@\n\n", "@\n\n", "### Response:\n", system="@\n\n"),
    "chatml": Turns(
        "<|im_start|>user\n@<|im_end|>\n",
        "<|im_start|>assistant\n@<|im_end|>\n",
        "<|im_start|>assistant\n",
        system="<|im_start|>system\n@<|im_end|>\n",
    ),
    "deepseek": Turns("<｜User｜>@", "<｜Assistant｜>@<｜end▁of▁sentence｜>", "<｜Assistant｜>", system="@", begin="BOS"),
    "gemma": Turns(
        "<start_of_turn>user\n@<end_of_turn>\n",
        "<start_of_turn>model\n@<end_of_turn>\n",
        "<start_of_turn>model\n",
        begin="BOS",
        strip=True,
    ),
    "glm4": Turns("<|user|>\n@", "<|assistant|>\n@", "<|assistant|>", system="<|system|>\n@", begin="[gMASK]<sop>"),
    "llama3": Turns(
        "<|start_header_id|>user<|end_header_id|>\n\n@<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n@<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        system="<|start_header_id|>system<|end_header_id|>\n\n@<|eot_id|>",
        begin="BOS",
        strip=True,
    ),
    "mistral": Turns("[INST] @[/INST]", " @</s>", "", begin="BOS"),
    "phi3": Turns("<|user|>\n@<|end|>\n", "<|assistant|>\n@<|end|>\n", "<|assistant|>\n", system="<|system|>\n@<|end|>\n"),
    "vicuna": Turns("USER: @\n", "ASSISTANT: @</s>\n", "ASSISTANT:", system="@\n\n"),
    "zephyr": Turns("<|user|>\n@</s>\n", "<|assistant|>\n@</s>\n", "<|assistant|>\n", system="<|system|>\n@</s>\n"),
}

BUILT_IN: dict[str, str] = {name: row.template for name, row in _ROWS.items()}
