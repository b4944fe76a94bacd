"""What a call of a verb says about a cluster, and what workers are told of the call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...convert.hub.fetch import is_repository
from ...errors import UsageError
from ..common.arguments import as_adapters

OUTPUTS = ("shared", "collect")
_PATHS = ("source", "out", "base", "recipe", "imatrix", "covariance", "metadata")
SENT = ("recipe", "imatrix", "covariance", "metadata")  # of these, files that are sent to the workers if they are small
_ONLY_OF_THE_WRITER = (
    *("cluster", "cluster_output", "progress", "threads", "verify", "manifest", "resume", "force", "dry_run"),
    *("partial_requant", "delete_source_shards"),
)


@dataclass(frozen=True)
class ClusterCall:
    """What a verb was asked to do with a cluster.

    address    as `open_cluster` takes it
    output     'shared': workers write into the output's folder; 'collect': they send what they make
    verb       name of the library's function; arguments: those of its call
    """

    address: str
    output: str
    verb: str
    arguments: Mapping[str, Any]

    def with_found(self, recipe_text: str) -> ClusterCall:
        """The call with the recipe that a search has found in place of its target."""
        searched = dict.fromkeys(("recipe", "target_size", "target_bpw", "max_kld", "types", "calibration"))
        return self.resolved(**searched, custom_q=(recipe_text,))

    def resolved(self, **arguments: Any) -> ClusterCall:
        """The call with these arguments, such as what the recipe says in paths relative to its own folder."""
        return replace(self, arguments=_worker_arguments({**self.arguments, **arguments}))


def cluster_call(verb: str, arguments: Mapping[str, Any]) -> ClusterCall | None:
    """The cluster that a call of a verb names, if it does; arguments: all of the call's, by name.

    Raises UsageError for arguments that go without a cluster, or do not go with one.
    """
    address, output = arguments["cluster"], arguments["cluster_output"]
    if address is None:
        if output is not None:
            raise UsageError("--cluster-output does nothing without --cluster")
        return None
    if output not in (None, *OUTPUTS):
        raise UsageError(f"--cluster-output is {output!r}; it can be {' or '.join(OUTPUTS)}")
    if arguments["threads"] is not None:
        raise UsageError("--threads does nothing with --cluster: how many a worker has is said where it is started")
    if arguments["delete_source_shards"]:
        raise UsageError("--delete-source-shards does not go with --cluster: workers may still read the shards")
    return ClusterCall(str(address), output or OUTPUTS[0], verb, _worker_arguments(arguments))


def _worker_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a verb's call as workers need them: absolute paths, nothing of what concerns the writer only."""
    kept = {name: value for name, value in arguments.items() if name not in _ONLY_OF_THE_WRITER}
    for name in _PATHS:
        if kept.get(name) is not None and not is_repository(kept[name]):
            kept[name] = str(Path(kept[name]).absolute())
    kept["lora"] = tuple(_absolute_adapter(str(adapter)) for adapter in as_adapters(kept["lora"]))
    return kept


def _absolute_adapter(adapter: str) -> str:
    """FILE or FILE=SCALE with an absolute path."""
    return str(Path(adapter).absolute())  # the scale follows the last part of the path
