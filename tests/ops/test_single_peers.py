"""With one head the read is "Attention Residuals" (arXiv 2603.15031): equality with two public implementations.

Their plain-PyTorch reference runs anywhere that the package is installed; their kernels need a GPU.
"""

import os

import pytest
import torch

from helpers.compare import assert_close
from helpers.reads import draw_read, read_results
from mhar.bench.peers import limit_autotuning
from mhar.ops import depth_read

os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")
# float32: the same equation in another order of sums. bfloat16: each side rounds its results once.
BOUNDS = {torch.float32: 5e-6, torch.bfloat16: 6e-3}
DTYPES = [torch.float32, torch.bfloat16]


def ours(sources, query, norm_weight, num_heads, eps):
    return depth_read(sources, query, norm_weight, num_heads=num_heads, eps=eps, return_weights=True, backend="triton")


def assert_equal_reads(theirs, count, dtype, device):
    """`theirs(sources, query, norm_weight, eps)` gives our output and our gradients."""
    inputs = draw_read(count, (3, 5), 128, 1, dtype, device=device)

    def read(sources, query, norm_weight, _num_heads, eps):
        return theirs(sources, query, norm_weight, eps), torch.empty(0)

    expected, found = read_results(read, inputs), read_results(ours, inputs)
    for name in ("out", "sources", "query", "norm_weight"):
        assert_close(name, found[name], expected[name], BOUNDS[dtype])


@pytest.mark.parametrize("count", [1, 7])
def test_fla_reference(count, device):
    naive = pytest.importorskip("fla.ops.attnres.naive")
    assert_equal_reads(lambda v, q, g, eps: naive.naive_attnres(q, v, g, rms_eps=eps), count, torch.float32, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 7])
def test_fla_kernels(count, dtype):
    fused = pytest.importorskip("fla.ops.attnres.fused")
    limit_autotuning(fused, 1, lambda config: config.num_stages == 2)
    assert_equal_reads(lambda v, q, g, eps: fused.fused_attnres(q, v, g, rms_eps=eps), count, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [2, 33])
def test_liger_kernels(count, dtype):
    """33 sources: earlier versions of Liger dropped those past 32 without a word."""
    liger = pytest.importorskip("liger_kernel.transformers.functional")
    assert_equal_reads(lambda v, q, g, eps: liger.liger_attn_res(torch.stack(v), q, g, eps), count, dtype, "cuda")
