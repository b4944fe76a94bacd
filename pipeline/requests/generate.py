"""What the verbs that generate text can be asked for: `generate`, `chat`, `serve`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...request_fields import argument, fields_of, option, request, values_of
from ...runtime.generation.recommended import recommended_sampling
from ...runtime.generation.sampling_options import Sampling
from ..common.messages import note
from ..common.progress import OnProgress
from .running import RunningModel

if TYPE_CHECKING:
    from ...runtime import Model
    from ...runtime.serve.app import RefusedRequest
    from ...runtime.serve.tasks import EndEvent
    from ..common.models import ModelLike


@request
class Generating(Sampling, RunningModel):
    """How text is generated."""

    model: ModelLike = argument(
        "A GGUF file, a checkpoint folder, or what `ggufmill.runtime.load_model` gave.", kind="model", kw_only=False
    )
    draft_max: int = option(
        "Tokens that the model's draft layer (MTP) proposes for each pass; the text stays the same; 0: none.",
        default=0,
        least=0,
    )


def sampling_of(request: Generating, model: Model) -> dict[str, Any]:
    """The fields of `Sampling`: those that the request was given, else what the model's file recommends, else the defaults. A
    note says what is recommended and used."""
    values = values_of(request, Sampling)
    changed = (field.name for field in fields_of(Sampling) if values[field.name] != field.default)
    given = getattr(request, "given", tuple(changed))
    recommended = {name: value for name, value in recommended_sampling(model.stored.metadata).items() if name not in given}
    if recommended:
        listed = ", ".join(f"{name} {value if name != 'samplers' else ';'.join(value)}" for name, value in recommended.items())
        note(f"sampling as the model's file recommends: {listed}", detail=True)
    return values | recommended


@request
class GenerateRequest(Generating):
    prompt: str = option(
        "Text to continue; control tokens spelled out in it are recognised.", flags="-p --prompt", kw_only=False
    )
    n_predict: int = option("Tokens at most; -1: no limit.", default=128, flags="-n --n-predict", least=-1)
    stop: Sequence[str] = option("Texts that end the generation and are not given out.", default=(), in_cli=False)
    ignore_eos: bool = option("Go on after the end-of-text token.", default=False)
    grammar: str | None = option(
        "Grammar that the text follows: GBNF, or Lark as llguidance reads it.", default=None, kind="once", metavar="GRAMMAR"
    )
    json_schema: str | Mapping[str, Any] | None = option(
        "The text is JSON that fits this schema; {}: any JSON.",
        default=None,
        flags="-j --json-schema",
        kind="once",
        metavar="SCHEMA",
    )
    on_text: Callable[[str], None] | None = option("Called with each piece of the text.", default=None, in_cli=False)
    progress: OnProgress | bool | None = option(
        "Stage 'generate' in tokens, from when the model is loaded.", default=None, in_cli=False
    )


@request
class Answering(Generating):
    """How the messages of a conversation are written, and answered."""

    template: str | Path | None = option(
        "Chat template: a Jinja file, or a name such as chatml, llama3, gemma.",
        default=None,
        metavar="FILE|NAME",
        shown="the model's own",
    )
    n_predict: int = option("Tokens per answer; -1: no limit.", default=-1, flags="-n --n-predict", least=-1)


@request
class ChatRequest(Answering):
    system: str | None = option("System message, before the first turn.", default=None, metavar="TEXT")


@request
class ServeRequest(Answering):
    host: str = option("Where to listen; 0.0.0.0: for other machines (needs a key or --no-key).", default="127.0.0.1")
    port: int = option("Port to listen on; 0: any that is free.", default=8080, least=0, most=65535)
    api_key: str | None = option(
        "Key that clients have to give. Other users of this machine can see arguments, but not the variable.",
        default=None,
        envvar="GGUFMILL_API_KEY",
    )
    no_key: bool = option("Let other machines in without a key.", default=False)
    allow_host: Sequence[str] = option(
        "Another name by which clients call this machine; repeatable.", default=(), metavar="NAME"
    )
    alias: str | None = option("Name of the model in the API.", default=None, shown="general.name")
    max_queue: int = option("Requests that may wait; more get 503.", default=16, least=0)
    max_body: int = option("Maximum size of a request, in MiB.", default=8, least=1, metavar="MiB")
    max_connections: int = option(
        "Connections open at once; one more ends the one that has kept the server waiting longest, or gets 503.",
        default=256,
        least=1,
    )
    metrics: bool = option("Report at /metrics what the server has done, for Prometheus.", default=False)
    slot_save_path: str | Path | None = option(
        "Folder in which clients save the KV cache of a slot, and restore it after a restart (POST "
        "/slots/0?action=save, restore).",
        default=None,
        kind="folder",
        metavar="DIR",
    )
    no_warmup: bool = option("Do not read a short prompt first.", default=False)
    parallel: int = option("Sequences served at once, each with the whole context.", default=1, flags="-np --parallel", least=1)
    on_ready: Callable[[str], None] | None = option("Called with the address when it listens.", default=None, in_cli=False)
    on_end: Callable[[EndEvent], None] | None = option("Called with the `EndEvent` of each answer.", default=None, in_cli=False)
    on_refused: Callable[[RefusedRequest], None] | None = option(
        "Called with each `RefusedRequest`.", default=None, in_cli=False
    )
    stop: threading.Event | None = option("Ends the server when it is set, by any thread.", default=None, in_cli=False)
