"""`ggufmill chat`: a conversation with a model."""

from __future__ import annotations

from ..runtime.text.chat import Conversation, find_template
from .common.arguments import read_template
from .common.models import open_generating_model
from .requests.generate import ChatRequest, sampling_of
from .requests.running import settings_of
from .requests.verb import verb


@verb(ChatRequest)
def start_chat(request: ChatRequest) -> Conversation:
    """Opens a conversation with a model: `answer(message)` of the result gives the pieces of each answer.

    The KV cache of earlier turns is reused: a new message costs its own tokens only.

    Returns a `Conversation`. Raises PlanError when there is no template, or none of that name.

    Example:
        >>> from ggufmill import start_chat
        >>> from ggufmill.recipes import FOLDER
        >>> chat = start_chat(FOLDER / "demo", template="chatml", n_predict=4, temp=0)
        >>> pieces = list(chat.answer("Hello"))
        >>> [message["role"] for message in chat.messages]
        ['user', 'assistant']
    """
    opened = open_generating_model(request.model, settings_of(request))
    template = find_template(opened.metadata, read_template(request.template))
    return Conversation(
        opened, template, request.system, request.n_predict, draft_max=request.draft_max, **sampling_of(request, opened)
    )
