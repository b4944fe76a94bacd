"""What a request says about a cluster, and the request as workers get it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...convert.hub.fetch import is_repository
from ...data_classes import dataclass
from ...errors import UsageError
from ...jobs.plan import Plan
from ...request_fields import fields_of
from ..common.arguments import as_adapters

OUTPUTS = ("shared", "collect")


@dataclass(frozen=True)
class ClusterCall:
    """What a verb was asked to do with a cluster.

    address    as `open_cluster` takes it
    output     'shared': workers write into the output's folder; 'collect': they send what they make
    plan       makes the plan of a request; workers call it
    request    as workers get it, see `worker_request`
    """

    address: str
    output: str
    plan: Callable[[Any], Plan]
    request: Any

    def with_found(self, recipe_text: str) -> ClusterCall:
        """The call with the recipe that a search has found in place of its target."""
        searched = dict.fromkeys(("recipe", "target_size", "target_bpw", "max_kld"))
        return self.resolved(replace(self.request, **searched, custom_q=(recipe_text,)))

    def resolved(self, request: Any) -> ClusterCall:
        """The call of a request with all that the recipe says and that follows from it."""
        return replace(self, request=worker_request(request))


def cluster_call(plan: Callable[[Any], Plan], request: Any) -> ClusterCall | None:
    """The cluster that a request names, if it does; plan: see `ClusterCall`.

    Raises UsageError for arguments that go without a cluster, or do not go with one.
    """
    address, output = request.cluster, request.cluster_output
    if address is None:
        if output is not None:
            raise UsageError("--cluster-output does nothing without --cluster")
        return None
    if output not in (None, *OUTPUTS):
        raise UsageError(f"--cluster-output is {output!r}; it can be {' or '.join(OUTPUTS)}")
    if request.threads is not None:
        raise UsageError("--threads does nothing with --cluster: how many a worker has is said where it is started")
    if request.delete_source_shards:
        raise UsageError("--delete-source-shards cannot be given with --cluster: workers may still read the shards")
    return ClusterCall(str(address), output or OUTPUTS[0], plan, worker_request(request))


def worker_request(request: Any) -> Any:
    """A request as workers need it: absolute paths, and the defaults of what concerns the writer only."""
    changed: dict[str, Any] = {}
    for field in fields_of(type(request)):
        travel = field.option.travel
        value: Any = getattr(request, field.name)
        if travel == "no":
            changed[field.name] = field.default
        elif travel in ("path", "file") and value is not None and not is_repository(value):
            changed[field.name] = str(Path(value).absolute())
        elif travel == "adapters":  # FILE=SCALE: the scale follows the last part of the path
            changed[field.name] = tuple(str(Path(adapter).absolute()) for adapter in as_adapters(value or ()))
    return replace(request, **changed)


def sent_fields(request: Any) -> list[str]:
    """The fields whose files are sent to workers."""
    return [f.name for f in fields_of(type(request)) if f.option.travel == "file" and getattr(request, f.name) is not None]
