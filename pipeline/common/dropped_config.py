"""What the config.json of a checkpoint says and its GGUF does not."""

from __future__ import annotations

from ...formats import TensorSource
from ...formats.source import LOST_CONFIG
from .messages import warn


def warn_on_dropped_config(source: TensorSource) -> None:
    """Warns of what was left out of a source, now or when it was converted."""
    warn([f"{source.path} is not all that its config.json says: {line}" for line in source.metadata.get(LOST_CONFIG, [])])
