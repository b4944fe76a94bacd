"""An OpenAI-compatible HTTP server with a built-in chat page. Needs starlette and uvicorn (extra `serve`)."""

from .app import make_app
from .engine import Engine
from .listen import serve, serve_models
from .server_settings import ServerSettings

__all__ = ["Engine", "ServerSettings", "make_app", "serve", "serve_models"]
