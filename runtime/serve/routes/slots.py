"""llama-server's slots: what they hold, and prompts kept in files across restarts."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ....formats import MillError
from ...session import Session
from ...session_file import is_saved_session, restore_session, save_session
from ..engine import Busy
from ..replies.generation_settings import shown_settings
from ..requests.checks import JsonObject, RequestError, invalid
from ..requests.field_limits import SLOT
from ..responses import as_request_error, json_response
from ..service import Service
from ..tasks import SlotState

MAX_SAVED = 64  # files of saved prompts; each has the KV cache of a whole prompt
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")


def slot_routes(service: Service, folder: Path | None) -> list[Route]:
    """The routes, for a served model. folder: of saved prompts; None: none are saved or restored."""

    def save(session: Session, path: Path) -> int:
        """`_save` in place of nothing, or of a saved session. Raises MillError."""
        if os.path.lexists(path):
            if not is_saved_session(path):
                raise MillError(f"{path.name} exists and is not a saved prompt; give another filename")
        elif sum(map(is_saved_session, path.parent.iterdir())) >= MAX_SAVED:
            raise MillError(f"{MAX_SAVED} prompts are saved, and no more are kept; name one of these, which is then replaced")
        return _save(session, path)

    async def use(number: int, function: Callable[[Session], Any]) -> tuple[Any, float]:
        """What a function makes of a slot's session, and milliseconds."""
        start = time.perf_counter()
        try:
            (result,) = await asyncio.wrap_future(service.engine.compute(service.engine.use_slot(number, function)))
        except Busy as error:
            raise as_request_error(error) from None
        except MillError as error:
            raise RequestError(str(error), param="filename", code="invalid_value") from None
        return result, 1000 * (time.perf_counter() - start)

    async def slots(request: Request) -> Response:
        states = service.engine.slots()
        if request.query_params.get("fail_on_no_slot") and all(state.is_processing for state in states):
            raise RequestError("no slot is free", param="fail_on_no_slot", code="server_overloaded", status=503)
        return json_response([_shown(i, state, service) for i, state in enumerate(states)])

    async def act(request: Request) -> Response:
        number, action = request.path_params["number"], request.query_params.get("action")
        if number >= service.engine.n_slots:
            raise RequestError(f"there are slots 0 to {service.engine.n_slots - 1}", param="id_slot", code="invalid_value")
        if action not in ("save", "restore", "erase"):
            raise invalid("action", "save, restore or erase", action)
        if action == "erase":
            n_erased, _ = await use(number, _erase)
            return json_response({"id_slot": number, "n_erased": n_erased})
        if folder is None:
            message = "prompts are not kept in files: the server was started without --slot-save-path"
            raise RequestError(message, param="action", status=501)
        name = await service.read(request, SLOT, lambda body: body.get("filename"))
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
            raise invalid("filename", "a name of up to 100 letters, digits and . _ -", name)
        function, path = (save if action == "save" else restore_session), folder / name
        (n_bytes, n_tokens), ms = await use(number, lambda session: (function(session, path), len(session.tokens)))
        done, moved = ("n_saved", "n_written") if action == "save" else ("n_restored", "n_read")
        return json_response(
            {"id_slot": number, "filename": name, done: n_tokens, moved: n_bytes, "timings": {f"{action}_ms": ms}}
        )

    return [
        Route("/slots", slots, methods=["GET"]),
        Route("/slots/{number:int}", act, methods=["POST"]),
    ]


def _shown(number: int, state: SlotState, service: Service) -> JsonObject:
    """A slot as llama-server shows it, and the tokens that it holds."""
    slot: JsonObject = {
        "id": number,
        "n_ctx": service.model.n_ctx,
        "speculative": bool(service.defaults.get("draft_max")),
        "is_processing": state.is_processing,
        "n_tokens": state.n_tokens,
    }
    if not state.task:
        return slot
    timings, generated = state.timings, state.timings.generated_tokens
    return slot | {
        "id_task": state.task,
        "n_prompt_tokens": state.n_tokens,
        "n_prompt_tokens_processed": timings.prompt_tokens,
        "n_prompt_tokens_cache": timings.cached_tokens,
        "params": shown_settings(state.options),
        "next_token": [{"has_next_token": state.is_processing, "n_remain": state.remaining, "n_decoded": generated}],
    }


def _save(session: Session, path: Path) -> int:
    """As `save_session`; without what was generated where the recurrent state of the prompt's end is needed to go on."""
    if session.model.is_recurrent:
        session.rewind(session.n_read)
    return save_session(session, path)


def _erase(session: Session) -> int:
    n_erased = len(session.tokens)
    session.rewind(0)
    return n_erased
