"""Power cuts: `python tests/torture/power.py [STATES [JOB ...]]`.

strace records what a job writes, truncates, renames, removes and syncs. A power cut at any of these calls leaves: of each file
what was synced, and any of the blocks written since; of each folder what was synced, and the first few of the changes of names
since. Some of these states are made, and in each the job is resumed: it has to end with exit code 0 and the bytes of an
undisturbed job. After the last call all outputs have to be whole without resuming.
"""

from __future__ import annotations

import random
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from jobs import JOBS, Trial, make_sources, undisturbed

BLOCK = 4096  # bytes that reach the disk together
_CALLS = "openat,close,write,pwrite64,lseek,ftruncate,fallocate,rename,unlink,mkdir,fsync,fdatasync,copy_file_range,sendfile"
_RECORD = re.compile(r"(?P<time>[\d.]+) (?P<call>\w+)\((?P<arguments>.*)\) += (?P<result>-?\d+)")
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_FD = re.compile(r"(\d+)<")


@dataclass
class Inode:
    """Content that is on disk, and what was done since: (offset, bytes) written, or a new length."""

    synced: bytes = b""
    pending: list[tuple[int, bytes] | int] = field(default_factory=list)

    def length(self) -> int:
        length = len(self.synced)
        for change in self.pending:
            length = change if isinstance(change, int) else max(length, change[0] + len(change[1]))
        return length

    def content(self, draw: random.Random | None = None) -> bytes:
        """All of it, or what a power cut may leave."""
        data = bytearray(self.synced)
        kept = 1.0 if draw is None else draw.choice((0.0, 0.5, 1.0))
        for change in self.pending:
            if isinstance(change, int):
                if draw is None or draw.random() < max(kept, 0.5):
                    data = data[:change] + bytes(max(0, change - len(data)))
                continue
            offset, written = change
            at = 0
            while at < len(written):
                stop = min(len(written), at + BLOCK - (offset + at) % BLOCK)
                if draw is None or draw.random() < kept:
                    data += bytes(max(0, offset + at - len(data)))
                    data[offset + at : offset + stop] = written[at:stop]
                at = stop
        return bytes(data)


@dataclass
class Disk:
    """The files below a folder: names on disk, and the changes of names since (name, inode or None)."""

    root: Path
    names: dict[str, Inode] = field(default_factory=dict)
    changes: list[list[tuple[str, Inode | None]]] = field(default_factory=list)

    def current(self) -> dict[str, Inode]:
        return self._with(len(self.changes))

    def _with(self, count: int) -> dict[str, Inode]:
        names = dict(self.names)
        for change in self.changes[:count]:
            for name, inode in change:
                if inode is None:
                    names.pop(name, None)
                else:
                    names[name] = inode
        return names

    def sync_names(self) -> None:
        self.names, self.changes = self.current(), []

    def state(self, draw: random.Random) -> dict[str, bytes]:
        """Files, name -> bytes, that a power cut may leave."""
        names = self._with(draw.randrange(len(self.changes) + 1))
        return {name: inode.content(draw) for name, inode in names.items()}


def read_records(prefix: Path) -> list[tuple[float, str, str, int]]:
    """(time, call, arguments, result) of all threads that wrote logs PREFIX.TID, by time, failed calls left out."""
    records = []
    for log in prefix.parent.glob(prefix.name + ".*"):
        for line in log.read_text("utf-8", errors="replace").splitlines():
            match = _RECORD.match(line)
            if match is not None and int(match["result"]) >= 0:
                records.append((float(match["time"]), match["call"], match["arguments"], int(match["result"])))
    return sorted(records, key=lambda record: record[0])


def _decoded(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


class Replay:
    """Applies recorded calls to a `Disk`."""

    def __init__(self, root: Path, before: Mapping[str, bytes] | None = None):
        """before: files that are there, and on disk, when the job begins."""
        self.disk = Disk(root, {name: Inode(data) for name, data in (before or {}).items()})
        self._open: dict[int, tuple[Inode | None, list[int], bool]] = {}  # inode (None: a folder), position, appends

    def _name(self, path: bytes) -> str | None:
        text = path.decode()
        return text[len(str(self.disk.root)) + 1 :] if text.startswith(f"{self.disk.root}/") else None

    def apply(self, call: str, arguments: str, result: int) -> bool:
        """Whether the call changed or synced something."""
        strings = [_decoded(s) for s in _STRING.findall(arguments)]
        if call == "openat":
            return self._opened(strings[0], arguments, result)
        if call in ("rename", "unlink"):
            return self._renamed(*(self._name(s) for s in strings))
        if call == "mkdir":
            return False
        match = _FD.match(arguments)
        fd = int(match[1]) if match else -1
        if call == "close":
            self._open.pop(fd, None)
            return False
        if fd not in self._open:
            return False
        inode, position, appends = self._open[fd]
        numbers = [int(n) for n in re.findall(r", (-?\d+)", _STRING.sub('""', arguments))]
        if call == "lseek":
            position[0] = result
            return False
        if call in ("fsync", "fdatasync"):
            if inode is None:
                self.disk.sync_names()
            else:
                inode.synced, inode.pending = inode.content(), []
            return True
        assert inode is not None, call
        if call == "ftruncate":
            inode.pending.append(numbers[0])
        elif call == "fallocate":
            inode.pending.append(max(inode.length(), numbers[-2] + numbers[-1]))
        elif call == "pwrite64":
            inode.pending.append((numbers[-1], strings[0][:result]))
        elif call == "write":
            start = inode.length() if appends else position[0]
            inode.pending.append((start, strings[0][:result]))
            position[0] = start + result
        else:
            raise AssertionError(f"{call} is not replayed")
        return True

    def _opened(self, path: bytes, arguments: str, fd: int) -> bool:
        self._open.pop(fd, None)
        if path == str(self.disk.root).encode():
            self._open[fd] = None, [0], False
            return False
        name = self._name(path)
        if name is None:
            return False
        inode = self.disk.current().get(name)
        is_new = inode is None
        if inode is None:
            if "O_CREAT" not in arguments:  # a folder below
                self._open[fd] = None, [0], False
                return False
            inode = Inode()
            self.disk.changes.append([(name, inode)])
        elif "O_TRUNC" in arguments:
            inode.pending.append(0)
        self._open[fd] = inode, [0], "O_APPEND" in arguments
        return is_new

    def _renamed(self, old: str | None, new: str | None = None) -> bool:
        if old is None:
            return False
        inode = self.disk.current().get(old)
        if inode is None:
            return False
        self.disk.changes.append([(old, None)] + ([(new, inode)] if new is not None else []))
        return True


def record(trial: Trial, prefix: Path) -> list[tuple[float, str, str, int]]:
    strace = ("strace", "-ff", "-qq", "-ttt", "-y", "-xx", "-s", str(1 << 24), "-e", f"trace={_CALLS}", "-o", str(prefix))
    done = trial.run(strace)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return read_records(prefix)


def changing(records: list[tuple[float, str, str, int]], trial: Trial) -> list[int]:
    """Indexes of the calls after which a power cut leaves something new."""
    replay = Replay(trial.folder, trial.before)
    return [i for i, (_, call, arguments, result) in enumerate(records) if replay.apply(call, arguments, result)]


def cut(records: list[tuple[float, str, str, int]], stop: int, trial: Trial, draw: random.Random) -> str:
    """Power goes after call number `stop`; returns what is wrong afterwards, or ''."""
    replay = Replay(trial.folder, trial.before)
    for _, call, arguments, result in records[: stop + 1]:
        replay.apply(call, arguments, result)
    trial.fill(replay.disk.state(draw))
    if stop == len(records) - 1 and (lost := trial.problem_at_the_end(durable=True)):
        return f"after the end: {lost}"
    return trial.problem_now() or trial.problem_after_resuming()


def torture(states: int, names: list[str] | None = None, report=print, seed: int = 1) -> Iterator[tuple[str, ...]]:
    """Rows (job, 'power cuts', states, problems)."""
    if shutil.which("strace") is None:
        return
    with tempfile.TemporaryDirectory(prefix="torture-") as tmp:
        sources = make_sources(Path(tmp) / "sources")
        for name in names or JOBS:
            draw = random.Random(f"{seed} {name}")
            made = undisturbed(name, sources, Path(tmp) / "trial")
            logs = Path(tmp) / name
            logs.mkdir()
            trial = Trial(name, sources, Path(tmp) / "trial", made)
            records = record(trial, logs / "log")
            moments = changing(records, trial)
            stops = [draw.choice(moments) for _ in range(states)] + [len(records) - 1] * max(1, states // 4)
            found = [cut(records, stop, Trial(name, sources, Path(tmp) / "trial", made), draw) for stop in stops]
            problems = [f"call {stop} ({records[stop][1]}): {p}" for stop, p in zip(stops, found, strict=True) if p]
            shutil.rmtree(logs)
            row = (name, f"power cuts ({len(moments)} moments)", str(len(stops)), "; ".join(problems))
            report(*row)
            yield row


if __name__ == "__main__":
    found = list(torture(int(sys.argv[1]) if len(sys.argv) > 1 else 10, sys.argv[2:] or None))
    sys.exit(any(row[-1] for row in found))
