"""Chat templates of a checkpoint: chat_template.jinja, or those in tokenizer_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...formats.file_range import read_text

_MAX_NAME = 200  # characters of a template's name, which becomes part of a metadata key


def chat_templates(folder: Path, settings: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """The key tokenizer.chat_template, and those of named templates: from chat_template.jinja, or else tokenizer_config.json
    (settings), which has one text or a list of named ones.

    Malformed templates are left out with a note, since a model can be used without.
    """
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return {"tokenizer.chat_template": read_text(path)}
        except OSError as error:
            notes.append(f"{path.name} cannot be read ({error.strerror or error}) and is left out")
        except UnicodeDecodeError:
            notes.append(f"{path.name} is not UTF-8 text and is left out")
    setting = settings.get("chat_template")
    if setting is None:
        return {}
    if isinstance(setting, str):
        return {"tokenizer.chat_template": setting}
    if not isinstance(setting, list):
        notes.append("the chat_template of tokenizer_config.json is neither a text nor a list of named ones and is left out")
        return {}
    templates: dict[str, str] = {}
    for entry in setting:
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if isinstance(name, str) and 0 < len(name) <= _MAX_NAME and isinstance(text, str):
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
