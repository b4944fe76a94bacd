"""Compiled kernels on disk: where they are stored, under which key, and what happens when that does not work.

numba's own cache looks only at the file of the kernel itself: an edit to a function it calls in another file, or to a table
it reads, would still be served stale. So each module's folder carries a digest of the module, of the modules of ours that
define what it imports, and so on, of the data files next to those, and of the target that code is generated for:

    CACHE_HOME/kernels/MODULE-DIGEST/

A package may bring folders of these names, which are looked into second (see kernel_pack.py). Every kernel is stored with a
checksum and the key it belongs to. One that is damaged or belongs to another key is compiled again; where nothing can be
stored, kernels are compiled in every process. Folders that have not been used for 30 days are deleted.
"""

from __future__ import annotations

import glob
import hashlib
import os
import pickle
import re
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core import caching
from numba.core.runtime.nrt import rtsys
from numba.core.serialize import dumps

from ...operating_system.files import cache_home
from ..target import target
from .kernel_pack import packed

ROOT = Path(__file__).parents[2]
DAY = 24 * 3600
UNUSED_DAYS = 30
_MODULE_FOLDER = re.compile(r"[\w.]+-[0-9a-f]{16}")
_CHECKSUM_BYTES = 32
# `from ..a.b import c, d`, over several lines in brackets. To parse every file would be a tenth of a short command's time.
_RELATIVE = re.compile(r"^[ \t]*from[ ]+(\.+)([\w.]*)[ ]+import[ ]+(\([^)]*\)|[^\n]*)", re.MULTILINE)
_NAME = re.compile(r"(\w+)(?:[ ]+as[ ]+(\w+))?")
_COMMENT = re.compile(r"[ ]*#.*")
# Errors, the system's calls, who compiles and what is said of it: no kernel's code depends on these.
_MAKES_NO_CODE = re.compile(r"/(errors|operating_system/\w+|simd/compile/(background|compile_time|kernel_pack))\.py")


# --- folders --------------------------------------------------------------------------------------------------------


@cache
def module_folder(source: Path) -> Path:
    """The folder of a module's kernels."""
    used = target()
    digest = hashlib.sha256(repr((numba.__version__, llvmlite.__version__, used.cpu, sorted(used.features))).encode())
    for path in sorted(_closure(source)):
        digest.update(_content_digest(path))
    name = ".".join(source.relative_to(ROOT).with_suffix("").parts) if source.is_relative_to(ROOT) else source.stem
    folder = cache_home() / "kernels" / f"{name}-{digest.hexdigest()[:16]}"
    _mark_used(folder)
    return folder


def mark_compiled(source: Path, name: str) -> None:
    """Writes a marker: all kernels that a module needs for `name` are compiled, for its present sources and this target.

    Without write permission there is no marker, and no error.
    """
    marker = _marker(source, name)
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError:
        pass


def is_marked_compiled(source: Path, name: str) -> bool:
    """Whether `mark_compiled` was called for these sources and this target, by any process."""
    marker = _marker(source, name)
    return marker.is_file() or packed(marker.parent.name, marker.name) is not None


def _marker(source: Path, name: str) -> Path:
    return module_folder(source) / f"{name}.compiled"


def _closure(source: Path) -> set[Path]:
    """The file, the modules of ours that it takes names from, directly or not, and the data files in their folders."""
    modules: set[Path] = set()
    todo = [source]
    while todo:
        path = todo.pop()
        if path not in modules:
            modules.add(path)
            todo += _imports(path)
    return modules.union(*(_data_files(folder) for folder in {path.parent for path in modules}))


@cache
def _content_digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


@cache
def _data_files(folder: Path) -> list[Path]:
    return [Path(entry.path) for entry in os.scandir(folder) if entry.name.endswith((".npz", ".json"))]


@cache
def _imports(path: Path) -> set[Path]:
    """The modules that a module takes names from by relative imports, but for those that make no code."""
    found = (_defining(folder, name) for folder, names in _relative_imports(path) for name in names.values())
    return {each for each in found if each and not _MAKES_NO_CODE.fullmatch(each.as_posix().removeprefix(ROOT.as_posix()))}


def _relative_imports(path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Of `from ..formats.types import x, y as z`: FORMATS/types and {'x': 'x', 'z': 'y'}."""
    for dots, module, names in _RELATIVE.findall(_COMMENT.sub("", path.read_text("utf-8"))):
        taken = {alias or name: name for name, alias in _NAME.findall(names)}
        yield path.parents[len(dots) - 1].joinpath(*module.split(".")), taken


@cache
def _defining(folder: Path, name: str) -> Path | None:
    """The module where a name is defined that is imported from `folder`: a package hands on names of its modules."""
    if (module := folder.with_suffix(".py")).is_file():
        return module
    for module in (folder / f"{name}.py", folder / name / "__init__.py"):
        if module.is_file():
            return module
    package = folder / "__init__.py"
    if not package.is_file():
        return None
    handed_on = ((source, names[name]) for source, names in _relative_imports(package) if name in names)
    return next((_defining(*each) for each in handed_on), package)


def _mark_used(folder: Path) -> None:
    """A folder's modification time is the day of its last use."""
    try:
        if time.time() - folder.stat().st_mtime > DAY:
            os.utime(folder)
    except OSError:
        pass  # not there yet, or not ours to write


def delete_unused(home: Path) -> list[Path]:
    """Deletes the folders of kernels that no process has used for UNUSED_DAYS, of this and of other versions; looks once a day.

    Returns them. Nothing but folders named MODULE-DIGEST in home/kernels is touched; a process that still runs has its kernels
    in memory, and makes the folder again for new ones.
    """
    kernels, now = home / "kernels", time.time()
    looked = kernels / ".looked"
    try:
        if now - looked.stat().st_mtime < DAY:
            return []
    except OSError:
        pass
    try:
        looked.touch()
        folders = [entry for entry in os.scandir(kernels) if entry.is_dir(follow_symlinks=False)]
        unused = [Path(f) for f in folders if now - f.stat().st_mtime > UNUSED_DAYS * DAY and _MODULE_FOLDER.fullmatch(f.name)]
    except OSError:
        return []
    for folder in unused:
        shutil.rmtree(folder, ignore_errors=True)
    return unused


# --- files ----------------------------------------------------------------------------------------------------------


class _Locator(caching._CacheLocator):
    """Says to numba where a function's kernels are stored."""

    def __init__(self, function: Any):
        self._folder, self._line = module_folder(Path(function.__code__.co_filename)), function.__code__.co_firstlineno

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _Locator:
        return cls(py_func)

    def get_cache_path(self) -> Any:
        return str(self._folder)

    def ensure_cache_path(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def get_source_stamp(self) -> Any:
        return ""  # the folder's name has the digest of the sources

    def get_disambiguator(self) -> Any:
        return str(self._line)


class _Files:
    """A file per kernel, with its key, behind a checksum; named after the key, so that processes may store kernels of the same
    function at the same time. What is not in the folder is looked for in its namesake of the package."""

    def __init__(self, folder: str, name: str):
        self._folder, self._name = Path(folder), name

    def save(self, key: Any, data: Any) -> None:
        self._write(self._folder / self._file(key), (key, data))

    def load(self, key: Any) -> Any:
        """What was saved under a key; None if nothing was, or if it is damaged."""
        for read in (self._stored, packed):
            content = read(self._folder.name, self._file(key))
            kept = None if content is None else _unpickled(content)
            if kept is not None and kept[0] == key:
                return kept[1]
        return None

    def flush(self) -> None:
        for path in self._folder.glob(f"{glob.escape(self._name)}.*.kernel"):
            path.unlink(missing_ok=True)

    def _file(self, key: Any) -> str:
        return f"{self._name}.{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.kernel"

    def _stored(self, folder: str, name: str) -> bytes | None:
        try:
            return (self._folder / name).read_bytes()
        except OSError:
            return None

    @staticmethod
    def _write(path: Path, value: Any) -> None:
        data = dumps(value)
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:16]}.tmp")
        try:
            temporary.write_bytes(hashlib.sha256(data).digest() + data)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _unpickled(content: bytes) -> Any:
    """The object in a file; None if it is damaged, or was pickled by something else, which may raise anything."""
    checksum, data = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
    try:
        return pickle.loads(data) if hashlib.sha256(data).digest() == checksum else None
    except Exception:
        return None


class _Kernels(caching.CompileResultCacheImpl):
    _locator_classes = [_Locator]  # noqa: RUF012

    def reduce(self, cres: Any) -> Any:
        """Without the environments of numba's own functions that hold nothing: to make those again imports numba's modules.
        Also without the source code with types beside it, which is longer than the machine code."""
        *kept, environments = cres._replace(type_annotation="")._reduce()
        return *kept, tuple(e for e in environments if e.consts or not e.globals["__name__"].startswith("numba."))


class KernelCache(caching.FunctionCache):
    """numba's cache of one function's kernels, over our folders and files."""

    _impl_class = _Kernels

    def __init__(self, function: Any):
        super().__init__(function)
        self._cache_file: Any = _Files(self.cache_path, self._impl.filename_base)

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return sig, codegen.magic_tuple(), _identity(self._py_func).hex()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """As numba does it, but without bringing into the context first all that could be compiled: that takes longer than
        loading the kernels of a command does, and whoever compiles does it anyway. Stored kernels call the runtime alone."""
        rtsys.initialize(target_context)
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn_not_stored(error)


def kept(source: Path, name: str, key: Any, make: Callable[[], Any]) -> Any:
    """What is stored under a key with a module's kernels; what is not there, or damaged, is made and stored."""
    folder = module_folder(source)
    files = _Files(str(folder), name)
    if (found := files.load(key)) is None:
        found = make()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            files.save(key, found)
        except OSError as error:
            _warn_not_stored(error)
    return found


def _warn_not_stored(error: OSError) -> None:
    _warn_once(f"kernels cannot be stored in {cache_home()} ({error.strerror}); GGUFMILL_CACHE names another folder")


def _identity(function: Any) -> bytes:
    """A digest of a function's code and of what it encloses, the same in every process: numba's own, by which dispatchers are
    pickled, never finds again what encloses a kernel."""
    digest = hashlib.sha256(function.__code__.co_code)
    for cell in function.__closure__ or ():
        kernel = getattr(cell.cell_contents, "__wrapped__", None)  # of a Kernel: its function
        digest.update(dumps(cell.cell_contents) if kernel is None else _identity(kernel))
    return digest.digest()


def cache_of(function: Any) -> Any:
    """The cache of a function's kernels: none if it has no file (typed into an interpreter)."""
    return KernelCache(function) if Path(function.__code__.co_filename).is_file() else caching.NullCache()


@cache
def _warn_once(text: str) -> None:
    print(text, file=sys.stderr)
