"""An OpenAI-compatible HTTP server with a built-in chat page. Needs starlette and uvicorn (extra `serve`)."""

from .app import make_app
from .engine import Engine
from .listen import serve, serve_models

__all__ = ["Engine", "make_app", "serve", "serve_models"]
