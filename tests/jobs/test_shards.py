"""Lists of files of a split, and the part of a plan that writes them."""

import numpy as np
import pytest

from ggufmill.errors import FormatError, PlanError
from ggufmill.formats import TYPES, open_gguf
from ggufmill.jobs.execute import execute
from ggufmill.jobs.outputs import Output
from ggufmill.jobs.plan import make_plan
from ggufmill.jobs.shards import only_shards, parse_shards


def plan_of(folder, content="", tensors=7, **split):
    def output(i):
        return Output(f"t{i}", (32, 4), "f32", TYPES["f32"], "kept", lambda a, b: np.full((b - a, 128), i, np.uint8))

    split = split or {"split_max_tensors": 2}
    return make_plan([output(i) for i in range(tensors)], {"general.name": "m"}, folder / "m.gguf", content=content, **split)


@pytest.mark.parametrize(("text", "numbers"), [("3-7", [3, 4, 5, 6, 7]), ("1,4,6-9", [1, 4, 6, 7, 8, 9]), (" 2 , 2-3", [2, 3])])
def test_lists(text, numbers):
    assert parse_shards(text) == numbers


@pytest.mark.parametrize(
    "text", ["", "0", "0-3", "7-3", "1,,2", "a", "1-2-3", "-1", "1-", "1;2", "99999999999", "1-200000", "1.5"]
)
def test_bad_lists(text):
    with pytest.raises(PlanError, match="files of a split") as error:
        parse_shards(text)
    assert "\n" not in str(error.value)


def test_parts_have_the_bytes_of_the_whole(tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = plan_of(tmp_path / "whole")
    execute(whole)
    for numbers in ([4, 2], [1], [3]):
        part = only_shards(plan_of(tmp_path / "parts"), numbers)
        assert part.fingerprint != whole.fingerprint
        assert [o.name for o in part.outputs] == [f"t{i}" for i in range(7) if i // 2 + 1 in numbers]
        assert execute(part).nbytes == sum(whole.files[n - 1].nbytes for n in numbers)
    files = sorted((tmp_path / "whole").iterdir())
    assert len(files) == 4
    assert [(f.name, f.read_bytes()) for f in files] == [
        (f.name, f.read_bytes()) for f in sorted((tmp_path / "parts").iterdir())
    ]


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(PlanError, match="no file 5; the output is split into files 1 to 4"):
        only_shards(plan_of(tmp_path), [2, 5, 6])
    with pytest.raises(PlanError, match="one file"):
        only_shards(plan_of(tmp_path, split_max_size=10**6), [1])


def test_a_file_of_another_plan_is_named(tmp_path):
    """Same tensors, types and metadata; what differs decides the bytes and is in no header but for the digest."""
    execute(plan_of(tmp_path, "one"))
    assert list(open_gguf(tmp_path / "m-00002-of-00004.gguf").metadata) == ["general.name"]
    for numbers in ([3], [1]):
        execute(only_shards(plan_of(tmp_path, "two"), numbers), force=True)
        with pytest.raises(FormatError, match=rf"m-0000{numbers[0]}-of-00004.gguf was written by another plan than m-0000"):
            open_gguf(tmp_path / "m-00002-of-00004.gguf")
        execute(only_shards(plan_of(tmp_path, "one"), numbers), force=True)
    execute(only_shards(plan_of(tmp_path, None), [2, 3]), force=True)  # without a digest, as gguf-split writes them
    with pytest.raises(FormatError, match="another plan"):
        open_gguf(tmp_path / "m-00002-of-00004.gguf")


def test_the_digest_knows_neither_path_nor_time(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    assert [f.header for f in plan_of(tmp_path).files] == [f.header for f in plan_of(tmp_path / "elsewhere").files]
    assert plan_of(tmp_path, "one").files[1].header != plan_of(tmp_path, "two").files[1].header
    single = plan_of(tmp_path, split_max_size=10**6)
    assert len(single.files) == 1
    assert b"split." not in single.files[0].header
