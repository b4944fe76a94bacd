"""`ggufmill chat`: a conversation with a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..runtime.text.chat import Conversation, find_template
from .common.arguments import read_template
from .common.models import ModelLike, open_generating_model
from .generate import split_options


def start_chat(
    model: ModelLike,
    *,
    system: str | None = None,
    template: str | Path | None = None,
    n_predict: int = -1,
    draft_max: int = 0,
    **options: Any,
) -> Conversation:
    """Opens a conversation with a model: `answer(message)` of the result gives the pieces of each answer.

    The KV cache of earlier turns is reused: a new message costs its own tokens only.

    model      as for `generate_text`
    system     system message, which comes before the first turn
    template   chat template: a Jinja file, the text of one, or a name such as 'chatml'; None: the model's own
    n_predict  tokens of an answer at most; -1: no limit
    draft_max  as for `generate_text`
    options    of `Sampling` and settings of `load_model`, as for `generate_text`

    Returns a `Conversation`. Raises PlanError when there is no template, or none of that name.

    Example:
        >>> from ggufmill import start_chat
        >>> from ggufmill.recipes import FOLDER
        >>> chat = start_chat(FOLDER / "demo", template="chatml", n_predict=4, temp=0)
        >>> pieces = list(chat.answer("Hello"))
        >>> [message["role"] for message in chat.messages]
        ['user', 'assistant']
    """
    sampling, settings = split_options(options)
    opened = open_generating_model(model, settings)
    return Conversation(
        opened, find_template(opened.metadata, read_template(template)), system, n_predict, draft_max=draft_max, **sampling
    )
