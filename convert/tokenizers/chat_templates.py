"""Chat templates of a checkpoint: chat_template.jinja, or what tokenizer_config.json holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_LONGEST_NAME = 200  # of a chat template: it becomes part of a key


def chat_templates(folder: Path, settings: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """tokenizer.chat_template: a chat_template.jinja file, or tokenizer_config.json's text or list of named ones.

    A model is of use without: what is broken is left out and noted.
    """
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return {"tokenizer.chat_template": path.read_text("utf-8")}
        except OSError as error:
            notes.append(f"{path.name} cannot be read ({error.strerror or error}) and is left out")
        except UnicodeDecodeError:
            notes.append(f"{path.name} is not UTF-8 text and is left out")
    told = settings.get("chat_template")
    if told is None:
        return {}
    if isinstance(told, str):
        return {"tokenizer.chat_template": told}
    if not isinstance(told, list):
        notes.append("the chat_template of tokenizer_config.json is neither a text nor a list of named ones and is left out")
        return {}
    templates: dict[str, str] = {}
    for entry in told:
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME and isinstance(text, str):
            templates[name] = text
        else:
            notes.append(f"the chat template {entry!r:.100} is not a name with a text and is left out")
    keys: dict[str, Any] = {}
    if "default" in templates:
        keys["tokenizer.chat_template"] = templates.pop("default")
    if templates:
        keys["tokenizer.chat_templates"] = list(templates)
        keys |= {f"tokenizer.chat_template.{name}": text for name, text in templates.items()}
    return keys
