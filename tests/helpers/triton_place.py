"""Where Triton's kernels are tested: in its interpreter, or on the device that tests are run on."""

import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from op_graphs import DEVICE  # noqa: E402

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # set by tests/conftest.py, before anything imports triton
if not IS_INTERPRETED and not DEVICE.startswith("cuda"):
    pytest.skip("kernels run in Triton's interpreter here", allow_module_level=True)
PLACE = torch.device("cpu" if IS_INTERPRETED else DEVICE)


def on_device(array):
    """An array of numpy as a tensor where kernels run."""
    return torch.from_numpy(array).to(PLACE)


@pytest.fixture(autouse=True)
def at_place():
    """Tensors are made where kernels run."""
    with PLACE:
        yield
