import os
import resource

import pytest

from ggufmill.formats import MillError
from ggufmill.jobs.atomic_write import whole_file, write_whole


def test_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new/folder/a.bin"
    write_whole(path, b"first")
    assert path.read_bytes() == b"first"

    def fail():
        with whole_file(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_bytes() == b"first"
    assert os.listdir(path.parent) == ["a.bin"]


def test_no_room(tmp_path):
    path, limits = tmp_path / "a.bin", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(MillError, match=r"a\.bin cannot be written: File too large"):
            write_whole(path, bytes(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not os.listdir(tmp_path)


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(MillError, match=r"file/a\.bin cannot be written: "):
        write_whole(tmp_path / "file/a.bin", b"x")
