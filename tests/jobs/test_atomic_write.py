import os

import pytest

from ggufmill.formats import MillError
from ggufmill.jobs.atomic_write import atomic_file, write_bytes
from ggufmill.operating_system.files import lock_file

resource = pytest.importorskip("resource")  # not on Windows


def test_an_interrupted_write_leaves_the_old_content(tmp_path):
    path = tmp_path / "new/folder/a.bin"
    write_bytes(path, b"first")
    assert path.read_bytes() == b"first"

    def fail():
        with atomic_file(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_bytes() == b"first"
    assert os.listdir(path.parent) == ["a.bin"]


def test_a_failed_write_leaves_nothing(tmp_path):
    path, limits = tmp_path / "a.bin", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(MillError, match=r"a\.bin cannot be written: File too large"):
            write_bytes(path, bytes(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not os.listdir(tmp_path)


def test_parent_that_is_a_file(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(MillError, match=r"file/a\.bin cannot be written: "):
        write_bytes(tmp_path / "file/a.bin", b"x")


def test_leftovers_of_dead_processes_are_removed(tmp_path):
    path, other = tmp_path / "a.bin", tmp_path / "a.bin.x.part"
    dead, alive = tmp_path / "a.bin.99999999.part", tmp_path / "a.bin.99999998.part"
    for left in (dead, alive, other):
        left.write_bytes(b"part")
    with alive.open("rb") as file:
        assert lock_file(file)
        write_bytes(path, b"whole")
    assert sorted(os.listdir(tmp_path)) == sorted(["a.bin", alive.name, other.name])


def test_the_name_is_on_disk_before_it_ends(tmp_path, monkeypatch):
    steps = []
    for name in ("sync_file", "sync_folder"):
        monkeypatch.setattr(
            f"ggufmill.jobs.atomic_write.{name}", lambda where, name=name: steps.append((name, os.listdir(tmp_path)))
        )
    write_bytes(tmp_path / "a.bin", b"x")
    assert [(name, [n.endswith(".part") for n in names]) for name, names in steps] == [
        ("sync_file", [True]),
        ("sync_folder", [False]),
    ]
