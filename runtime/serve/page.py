"""The built-in page: one file that needs nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files


@cache
def page() -> tuple[str, str]:
    """The page and its Content-Security-Policy, which lets nothing run but its own script."""
    text = files(str(__package__)).joinpath("page.html").read_text("utf-8")

    def hashed(tag: str) -> str:
        bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(b.encode()).digest()).decode()}'" for b in bodies)

    policy = (
        f"default-src 'none'; script-src {hashed('script')}; style-src {hashed('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy
