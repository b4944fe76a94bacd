"""An OpenAI-compatible HTTP server over a model, with a page to talk to it. Needs starlette and uvicorn (extra `serve`)."""

from .app import make_app
from .engine import Engine
from .listen import serve

__all__ = ["Engine", "make_app", "serve"]
