"""quantize and convert with --cluster: the bytes of one machine."""

import pytest

pytest.importorskip("distributed")

import ggufmill
from ggufmill.recipes import FOLDER

DEMO = FOLDER / "demo"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "q.gguf"
    return ggufmill.quantize_model(DEMO, out, "Q4_K_M", custom_q="ffn_down=q6_k")


@pytest.mark.parametrize("output", ["shared", "collect"])
def test_same_bytes_as_alone(alone, output, tmp_path):
    result = ggufmill.quantize_model(
        DEMO, tmp_path / "q.gguf", "Q4_K_M", custom_q="ffn_down=q6_k", cluster="local:2", cluster_output=output
    )
    assert result.files[0].read_bytes() == alone.files[0].read_bytes()
    assert result.checksums == alone.checksums
    assert sum(share.nbytes for share in result.shares) == result.plan.total_bytes
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q.gguf"]
