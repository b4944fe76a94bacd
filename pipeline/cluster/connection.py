"""A dask cluster for the time of a job: a running scheduler, or workers of this machine that end with the job."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import MillError, PlanError, installation
from ...jobs.code_digest import code_digest
from ...operating_system.memory import free_bytes
from ...version import __version__
from ..common.messages import note, warn

if TYPE_CHECKING:
    from .sent_files import SentFile


def program_identity() -> dict[str, str]:
    """What decides the bytes that this process makes: name -> version or digest."""
    import llvmlite
    import numba

    return {
        "ggufmill": __version__,
        "code": code_digest(),
        "numba": numba.__version__,
        "llvmlite": llvmlite.__version__,
        "numpy": np.__version__,
        "Python": "{}.{}".format(*sys.version_info),
    }


def difference(own: Mapping[str, str], other: Mapping[str, str]) -> str:
    """What is different there, in words: 'numba 0.61.0 instead of 0.62.1'; '' if nothing is."""
    return ", ".join(
        f"{name} {other.get(name, 'unknown')} instead of {value}" for name, value in own.items() if other.get(name) != value
    )


FORMS = "tcp://HOST:PORT, the path of a scheduler file, or local:N for N processes of this machine"
CONNECT_SECONDS = 30.0
POLL_SECONDS = 1.0  # between two looks at which workers are there
LONE_SECONDS = 60.0  # without any worker, until the job is given up: nannies need some to start workers again
WAIT_SECONDS = 60.0  # for the first worker of a scheduler that has none yet
LOCAL_MEMORY = 0.8  # of what is free, for all workers of this machine together
MIN_LOCAL_MEMORY = 1 << 30


class Cluster:
    """A connected cluster and the workers of it that may be given work.

    client   a Client of dask.distributed (whose methods are typed for its asynchronous use too)
    refused  addresses of workers that run something else than this process -> what differs
    """

    def __init__(self, client: Any, address: str):
        self.client, self.address = client, address
        self.refused: dict[str, str] = {}
        self._own = program_identity()
        self._admitted: set[str] = set()
        self._sent: dict[str, SentFile] = {}
        self._names: dict[str, str] = {}
        self._hosts: dict[str, str] = {}

    def look(self) -> dict[str, int]:
        """Address -> threads of the workers that are there now and may be given work. A worker that came meanwhile is checked
        first; one that differs is refused with a warning, and one that is gone is named."""
        present: dict[str, int] = _present(self.client)
        for address in sorted(self._admitted - present.keys()):
            self._admitted.discard(address)
            warn([f"worker {self.name(address)} is lost; others make its pieces again"])
        new = [address for address in present if address not in self._admitted and address not in self.refused]
        if new:
            self._check(new)
        return {address: threads for address, threads in present.items() if address in self._admitted}

    @property
    def known(self) -> int:
        """How many there were at the last `look`."""
        return len(self._admitted)

    @property
    def slots(self) -> int:
        """Pieces that are worked on at the same time: threads of all workers, at least 1."""
        return max(1, sum(self.look().values()))

    @property
    def dashboard(self) -> str | None:
        """Address of dask's dashboard, where there is one."""
        is_shown = find_spec("bokeh") is not None and not self.address.startswith("local:")
        return self.client.dashboard_link if is_shown else None

    def name(self, address: str) -> str:
        """'NAME at HOST' of a worker, or HOST of one without a name of its own, for messages and reports."""
        return self._names.get(address, address)

    def host(self, address: str) -> str:
        """The machine of a worker."""
        return self._hosts.get(address, address)

    def refuse(self, address: str, reason: str) -> None:
        """This worker is given no more work; says so."""
        self._admitted.discard(address)
        self.refused[address] = reason
        warn([f"worker {self.name(address)} is not given work: {reason}"])

    def send(self, path: str | Path) -> str | SentFile:
        """A file of this machine as workers find it: it is sent to all of them if it is small, else its absolute path.

        Raises PlanError where a worker cannot keep it.
        """
        from .file_plugin import plugin_of

        plugin = plugin_of(Path(path))
        if plugin is None:
            return str(Path(path).absolute())
        file = plugin.file
        name = f"ggufmill-{file.digest}-{file.name}"
        if name not in self._sent:
            try:
                self.client.register_plugin(plugin, name=name)
            except OSError as error:
                raise PlanError(f"{path} cannot be sent to the workers: {_first_line(error)}") from None
            self._sent[name] = file
        return file

    def take_back(self) -> None:
        """Removes the files that were sent, as far as workers can be reached."""
        for name in self._sent if self.client.status == "running" else ():
            with suppress(Exception):
                self.client.unregister_worker_plugin(name)
        self._sent.clear()

    def memory_limit(self) -> int | None:
        """Bytes that the worker with the least memory may take; None where no limit is known."""
        known = self.client.scheduler_info(n_workers=-1)["workers"]
        limits = [known[address].get("memory_limit") for address in self._admitted if address in known]
        return min(filter(None, limits), default=None)

    def _check(self, addresses: list[str]) -> None:
        known = self.client.scheduler_info(n_workers=-1)["workers"]
        for address in addresses:
            info = known.get(address, {})
            self._hosts[address] = info.get("host") or address
            self._names[address] = worker_name(address, info.get("name", ""), self._hosts[address])
        answers: dict[str, Any] = self.client.run(program_identity, workers=addresses, on_error="return")
        for address in addresses:
            answer = answers.get(address)
            if isinstance(answer, dict):
                different = difference(self._own, answer)
            elif answer is None or isinstance(answer, OSError):  # gone, or it does not answer: asked again if it is there
                continue
            else:
                different = f"this program cannot be imported there ({_first_line(answer)})"
            if different:
                self.refused[address] = different
                if self._admitted:
                    self.refuse(address, different)
            else:
                self._admitted.add(address)


class Watch:
    """The workers of a cluster, looked at once in a while."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._workers: dict[str, int] = {}
        self._looked, self._last_seen = -POLL_SECONDS, monotonic()

    def look(self, *, now: bool = False) -> dict[str, int]:
        """As `Cluster.look`, of a moment ago unless `now`. Raises MillError if no worker has been there for long."""
        time = monotonic()
        if now or time - self._looked >= POLL_SECONDS:
            self._workers, self._looked = self._cluster.look(), time
            if self._workers:
                self._last_seen = time
            elif time - self._last_seen > LONE_SECONDS:
                raise MillError(f"no worker of {self._cluster.address} is left")
        return self._workers


def worker_name(address: str, name: object, host: str) -> str:
    """What a worker is called in messages: its name if it was given one, and the machine."""
    return host if str(name) in ("", address) else f"{name} at {host}"


def _present(client: Any) -> dict[str, int]:
    try:
        return dict(client.nthreads())
    except (OSError, ValueError, AttributeError) as error:
        raise MillError(f"the scheduler does not answer any more ({error})") from None


@contextmanager
def open_cluster(address: str, *, wait: float = WAIT_SECONDS) -> Iterator[Cluster]:
    """Connects to a cluster, and leaves it (or ends it, if it is local:N) with the context.

    address: `tcp://host:port` (or tls://, with certificates in dask's configuration) of a scheduler, the path of its scheduler
    file, or `local:N`: N worker processes of this machine with one thread each. wait: seconds for the first worker to come.

    Raises PlanError for an address of another form, a scheduler that cannot be reached, without a worker, or when a worker that
    is there runs other versions or other code than this process.
    """
    try:
        import distributed
    except ImportError:
        raise PlanError(f"--cluster needs dask.distributed: {installation('distributed')}") from None
    local = re.fullmatch(r"local:([1-9]\d{0,3})", address)
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # lost workers and the like are said by us, in one line
    if local is not None:
        with _local_cluster(int(local[1])) as scheduler:
            yield from _connected(distributed.Client(scheduler, set_as_default=False), address, wait)
        return
    known: dict[str, Any]
    if re.fullmatch(r"(tcp|tls|ucx|ws|wss)://\S+:\d+", address):
        known = {"address": address}
    elif Path(address).is_file():
        known = {"scheduler_file": address}
    else:
        raise PlanError(f"{address!r} is no cluster: give {FORMS}")
    try:
        client = distributed.Client(**known, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError, KeyError) as error:
        raise PlanError(f"the scheduler at {address} cannot be reached ({_first_line(error)})") from None
    yield from _connected(client, address, wait)


@contextmanager
def _local_cluster(count: int) -> Iterator[Any]:
    """Workers of this machine. Whoever reaches one, or the scheduler, may have it run code, and every user of a machine reaches
    the ports of its loopback address: certificates that only these processes have keep others out, and dask's pages, which ask
    for none, are left out."""
    import dask.config
    from distributed import LocalCluster
    from distributed.security import Security

    try:
        security = Security.temporary()
    except ImportError:
        raise PlanError(f"--cluster local:N needs cryptography: {installation('cryptography')}") from None
    free = free_bytes()
    memory = max(MIN_LOCAL_MEMORY, int(free * LOCAL_MEMORY / count)) if free is not None else "auto"
    settings = {
        "distributed.comm.timeouts.connect": "120s",  # a busy machine may take long to answer
        "distributed.scheduler.http.routes": [],
        "distributed.worker.http.routes": [],
    }
    with dask.config.set(settings):
        try:
            cluster = LocalCluster(
                n_workers=count,
                processes=True,
                threads_per_worker=1,
                memory_limit=memory,
                dashboard_address="127.0.0.1:0",
                scheduler_kwargs={"dashboard": False},
                security=security,
                silence_logs=logging.CRITICAL,
            )
        except RuntimeError as error:
            raise PlanError(
                f"workers cannot be started here ({_first_line(error)}); in a script, what starts them stands under "
                "`if __name__ == '__main__':`"
            ) from None
        with cluster:
            yield cluster


def _connected(client: Any, address: str, wait: float) -> Iterator[Cluster]:
    try:
        cluster = Cluster(client, address)
        try:
            client.wait_for_workers(1, timeout=wait)
        except TimeoutError:
            raise PlanError(f"the scheduler at {address} has no workers: start some with `dask worker {address}`") from None
        workers = cluster.look()
        if cluster.refused:
            refused = next(iter(cluster.refused))
            more = f" (and {len(cluster.refused) - 1} more)" * (len(cluster.refused) > 1)
            raise PlanError(
                f"worker {cluster.name(refused)}: {cluster.refused[refused]}{more}; install the same there, or end that worker"
            )
        if not workers:
            raise PlanError(f"no worker of {address} answers")
        note(f"cluster: {len(workers)} workers, {sum(workers.values())} threads", detail=True)
        if cluster.dashboard:
            note(f"dashboard: {cluster.dashboard}", detail=True)
        try:
            yield cluster
        finally:
            cluster.take_back()
    finally:
        client.close(timeout=5)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
