"""The built-in pages, made of the files in web/, with the header that allows nothing else."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

# path -> the page's name, and its scripts in this order
PAGES = {
    "/": ("page", ("state", "markdown", "conversations", "tokens", "settings", "versions", "chat")),
    "/compare": ("compare", ("state", "markdown", "tokens", "compare")),
}


@cache
def load_page(path: str) -> tuple[str, str]:
    """The built-in page at a path, which loads nothing from elsewhere: its HTML, and its Content-Security-Policy, which allows
    only the page's own script and style sheet."""
    name, scripts = PAGES[path]
    folder = files(str(__package__)).joinpath("web")

    def part(name: str) -> str:
        return folder.joinpath(name).read_text("utf-8")

    style, script = part("style.css"), "\n".join(part(f"{script}.js") for script in scripts)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return part(f"{name}.html").replace("{style}", style).replace("{script}", script), policy


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
