"""The program behind the command line: one module per verb, imported when it is called for; errors and signals as one line."""

from __future__ import annotations

import functools
import gc
import io
import os
import sys
import threading
import traceback
from _thread import interrupt_main
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import NoReturn

import click

from .. import VERBS, module_of
from ..operating_system.process import raise_open_file_limit
from ..version import __version__
from . import signals
from .command import HELP
from .display.messages import ERROR, label

# what other programs call a verb -> what it is here
_OTHER_NAMES = {
    "ppl": "perplexity",
    "kld": "perplexity --kl-divergence",
    "eval": "evaluate",
    "info": "inspect",
    "show": "inspect",
    "dump": "inspect",
    "list": "recipes list",
    "ls": "recipes list",
    "push": "upload",
    "dequantize": "quantize (to bf16, with --allow-requantize)",
    "complete": "generate",
    "server": "serve",
    "calibrate": "imatrix",
}
_RAISE_AGAIN_AFTER = 0.05  # seconds
_OBJECTS_BETWEEN_COLLECTIONS = 100_000


@functools.cache
def _collect_less_garbage() -> None:
    """What modules define and numba reads of its kernels is never garbage: looking for some in them again and again takes a
    tenth of the time of a short command."""
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *gc.get_threshold()[1:])


@functools.cache
def _freeze_modules() -> None:
    """Modules are never garbage: collecting them repeatedly takes a quarter of a second."""
    gc.freeze()


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command = import_module(f".{module_of(cmd_name)}", __package__).command
        _freeze_modules()
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, ["--version"] if args == ["version"] else args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            from difflib import get_close_matches

            near = _OTHER_NAMES.get(args[0]) or " or ".join(get_close_matches(args[0], VERBS, 2))
            ctx.fail(f"there is no verb {args[0]!r}" + (f"; did you mean {near}?" if near else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):  # from the table: --help imports no verb
            formatter.write_dl([(name, verb.summary) for name, verb in VERBS.items()])


@click.group(cls=_Verbs, context_settings={"help_option_names": list(HELP), "max_content_width": 120})
@click.option("--debug", is_flag=True, help="Show a traceback when something fails.")
@click.version_option(__version__, "-V", "--version", prog_name="ggufmill")
def group(debug: bool) -> None:
    """From a Hugging Face checkpoint to a validated, recipe-quantised, repacked GGUF.

    Example: ggufmill quantize DeepSeek-V3/ out.gguf --recipe deepseek-v3-iq4_k_r4.txt --dry-run
    """


def run(arguments: list[str] | None = None) -> None:
    """Does what `main` promises."""
    arguments = sys.argv[1:] if arguments is None else arguments
    _collect_less_garbage()
    _make_writable()
    raise_open_file_limit()
    try:
        with _no_interrupt_lost():
            status = group.main(arguments, prog_name="ggufmill", standalone_mode=False)
        sys.stdout.flush()
        sys.exit(status if isinstance(status, int) else 0)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        where = getattr(error, "ctx", None)
        hint = f" (`{where.command_path} --help` shows how it is used)" if where is not None else ""
        _fail(" ".join(error.format_message().split()).rstrip(".") + hint, 2)
    except (KeyboardInterrupt, click.Abort) as error:
        offer = str(error.__cause__ or error)  # click turns the one into the other
        _fail(f"interrupted; {offer}" if offer else "interrupted", signals.exit_code())
    except BrokenPipeError:  # the reader is gone: what is left must not be written when the program ends, either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if signals.received():  # within an import, for example, which makes an ImportError of it
            _fail("interrupted", signals.exit_code())
        if "--debug" in arguments:
            traceback.print_exc()
        _fail(_one_line(error))


@contextmanager
def _no_interrupt_lost() -> Iterator[None]:
    """Within this, a KeyboardInterrupt that C code swallowed is raised again a moment later.

    Ctrl-C within a Python function that C code calls (LLVM does, when it has compiled a kernel) ends that function only, since
    nothing can be raised through C.
    """
    before = sys.unraisablehook

    def again(lost: sys.UnraisableHookArgs) -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            before(lost)
            return
        signals.expect_again()
        timer = threading.Timer(_RAISE_AGAIN_AFTER, interrupt_main)
        timer.daemon = True
        timer.start()

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before


def _one_line(error: Exception) -> str:
    from ..formats import MillError

    if isinstance(error, MillError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'input/output'}: {error.strerror}"
    if isinstance(error, MemoryError):
        return "out of memory; fewer threads (-t) need less"
    if (unloaded := _unloaded_library(error)) is not None:
        return f"a library cannot be loaded, for want of memory or because its file is damaged: {unloaded}"
    return f"internal error: {type(error).__name__}: {error} (`ggufmill --debug ...` shows where; please report it)"


def _unloaded_library(error: BaseException | None) -> ImportError | None:
    """The error of a library (not a module of Python's) that could not be loaded, from which this one may have been made, as
    numpy does."""
    while error is not None:
        if isinstance(error, ImportError) and error.path and not error.path.endswith(".py"):
            return error
        error = error.__cause__ or error.__context__
    return None


def _make_writable() -> None:
    """Closed streams become /dev/null, and characters that an encoding lacks are written as escapes."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  (as long as the program lives)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _fail(text: str, code: int = 1) -> NoReturn:
    """Prints one line, whatever characters a name or message has, and exits."""
    print(label("ggufmill:", ERROR), "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text), file=sys.stderr)
    sys.exit(code)
