"""The weights of a source in float64, as functions of the torch backend read them, for gradients that differences confirm."""

from contextlib import contextmanager

import torch

from ggufmill.formats import dims


class DoubleMatrix:
    """As `Matrix`: dense."""

    def __init__(self, rows, matrices):
        self.rows = rows.view(matrices, -1, rows.shape[1])

    def multiply(self, x):
        return x @ self.rows[0].T

    def multiply_back(self, g):
        return g @ self.rows[0]

    def multiply_experts(self, x, experts):
        x = x[:, None].expand(-1, experts.shape[1], -1) if x.ndim == 2 else x
        return torch.einsum("nuc,nurc->nur", x, self.rows[experts])

    def multiply_experts_back(self, g, experts):
        return torch.einsum("nur,nurc->nuc", g, self.rows[experts])

    def decoded(self):
        return self.rows.flatten(0, 1)

    def gather(self, ids):
        return self.rows[0][ids]

    __getitem__ = gather


class DoubleWeights:
    """As `Weights`."""

    def __init__(self, source):
        self.source = source

    def _rows(self, weight):
        tensor = self.source.tensors[weight.name]
        step = dims(tensor.shape)[1]
        runs = [torch.from_numpy(tensor.read(i, i + step).copy()) for i in range(0, tensor.n_rows, step)]
        return torch.cat(runs).double()

    def matrix(self, weight, device):
        return DoubleMatrix(self._rows(weight), dims(weight.shape)[2])

    def vector(self, weight, device):
        return self._rows(weight).reshape(weight.shape[::-1])

    def release(self, most):
        pass

    @contextmanager
    def visit(self):
        yield
