"""What the verbs that generate text can be asked for: `generate`, `chat`, `serve`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...request_fields import argument, fields_of, option, request, values_of
from ...runtime.generation.recommended import recommended_sampling
from ...runtime.generation.sampling_options import Sampling
from ..common.arguments import Size
from ..common.messages import note
from ..common.progress import OnProgress
from .running import RunningModel

if TYPE_CHECKING:
    from ...runtime import Model
    from ...runtime.serve.served_models import ModelEvent
    from ...runtime.serve.server_settings import RefusedRequest
    from ...runtime.serve.tasks import EndEvent
    from ..common.models import ModelLike


_MODEL = "A GGUF file, a checkpoint folder, or what `ggufmill.runtime.load_model` gave"


@request
class Generating(Sampling, RunningModel):
    """How text is generated."""

    draft_max: int = option(
        "Let the model's draft layer (MTP) propose up to this many tokens for each pass; the text stays the "
        "same; 0 switches it off.",
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
    model: ModelLike = argument(f"{_MODEL}.", kind="model", kw_only=False)
    prompt: str = option(
        "Continue this text; control tokens spelled out in it are recognised.", flags="-p --prompt", kw_only=False
    )
    n_predict: int = option(
        "Generate at most this many tokens; -1 sets no limit.", default=128, flags="-n --n-predict", least=-1
    )
    stop: Sequence[str] = option("End the generation at one of these texts, which is not given out.", default=(), in_cli=False)
    ignore_eos: bool = option("Continue after the end-of-text token.", default=False)
    grammar: str | None = option(
        "Follow this grammar: GBNF, or Lark as llguidance reads it.", default=None, kind="once", metavar="GRAMMAR"
    )
    json_schema: str | Mapping[str, Any] | None = option(
        "Generate JSON that fits this schema; {} stands for any JSON.",
        default=None,
        flags="-j --json-schema",
        kind="once",
        metavar="SCHEMA",
    )
    on_text: Callable[[str], None] | None = option("Call this with each piece of the text.", default=None, in_cli=False)
    progress: OnProgress | bool | None = option(
        "Call this with each `Progress` report; True shows a bar. Stage 'generate' in tokens, from when the model is loaded.",
        default=None,
        in_cli=False,
    )


@request
class Answering(Generating):
    """How the messages of a conversation are written, and answered."""

    template: str | Path | None = option(
        "Use this chat template: a Jinja file, or a name such as chatml, llama3, gemma.",
        default=None,
        metavar="FILE|NAME",
        shown="the model's own",
    )
    n_predict: int = option(
        "Generate at most this many tokens per answer; -1 sets no limit.", default=-1, flags="-n --n-predict", least=-1
    )


@request
class ChatRequest(Answering):
    model: ModelLike = argument(f"{_MODEL}.", kind="model", kw_only=False)
    system: str | None = option("Put this system message before the first turn.", default=None, metavar="TEXT")


@request
class ServeRequest(Answering):
    model: ModelLike | None = argument(f"{_MODEL}; none with `models`.", default=None, kind="model", kw_only=False)
    models: str | Path | None = option(
        "Serve the GGUF models of this folder and of the folders in it, in place of MODEL: requests name one in the field "
        "`model`, and it is loaded when it is first asked for.",
        default=None,
        flags="--models --models-dir",
        kind="existing_folder",
        metavar="DIR",
    )
    models_max: int = option(
        "Keep at most this many models loaded; for one more, that which was used least recently is unloaded. 0: no limit.",
        default=4,
        least=0,
        metavar="N",
    )
    models_memory: Size | None = option(
        "Keep models loaded that take together at most this much memory, with full contexts; one that alone takes more is "
        "refused.",
        default=None,
        kind="size",
        shown="nine tenths of this machine's, where a model that takes more is loaded alone",
    )
    models_autoload: bool = option(
        "Let requests load the model that they name; without, only /models/load does.",
        default=True,
        flags="--models-autoload/--no-models-autoload",
        rare=True,
    )
    host: str = option(
        "Listen at this address; 0.0.0.0 lets other machines connect (and needs a key or --no-key).", default="127.0.0.1"
    )
    port: int = option("Listen on this port; 0 takes any that is free.", default=8080, least=0, most=65535)
    api_key: str | None = option(
        "Refuse clients that do not give this key. Other users of this machine can see arguments, but not the variable.",
        default=None,
        envvar="GGUFMILL_API_KEY",
    )
    no_key: bool = option("Let other machines in without a key.", default=False, rare=True)
    allow_host: Sequence[str] = option(
        "Accept requests to this host name too; may be given several times.", default=(), metavar="NAME", rare=True
    )
    alias: str | None = option("Give the model this name in the API.", default=None, shown="general.name")
    max_queue: int = option("Let at most this many requests wait; further ones get 503.", default=16, least=0, rare=True)
    max_body: int = option("Refuse requests larger than this many MiB.", default=8, least=1, metavar="MiB", rare=True)
    max_connections: int = option(
        "Keep at most this many connections open; one more ends the one that has kept the server waiting longest, or gets 503.",
        default=256,
        least=1,
        rare=True,
    )
    metrics: bool = option("Serve counters of requests, tokens and times at /metrics, for Prometheus.", default=False)
    slot_save_path: str | Path | None = option(
        "Let clients save the KV cache of a slot in this folder, and restore it after a restart (POST "
        "/slots/0?action=save, restore).",
        default=None,
        kind="folder",
        metavar="DIR",
    )
    no_warmup: bool = option("Start without reading a short prompt first.", default=False, rare=True)
    parallel: int = option(
        "Serve up to this many sequences at once, each with the whole context.", default=1, flags="-np --parallel", least=1
    )
    on_ready: Callable[[str], None] | None = option(
        "Call this with the address once the server listens.", default=None, in_cli=False
    )
    on_end: Callable[[EndEvent], None] | None = option(
        "Call this with the `EndEvent` of each answer.", default=None, in_cli=False
    )
    on_refused: Callable[[RefusedRequest], None] | None = option(
        "Call this with each `RefusedRequest`.", default=None, in_cli=False
    )
    on_model: Callable[[ModelEvent], None] | None = option(
        "Call this with the `ModelEvent` of each model of `models` that is loaded or unloaded.", default=None, in_cli=False
    )
    stop: threading.Event | None = option("End the server when this is set, by any thread.", default=None, in_cli=False)
