"""Built-in chat templates by name, for models whose metadata has none: the prompt formats of well-known families.

Each format is a `TurnFormat`, from which a Jinja template is made. Where a family has no system role, the system message is put
in front of the first user message, as the family's own template does.
"""

from __future__ import annotations

from dataclasses import dataclass


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
