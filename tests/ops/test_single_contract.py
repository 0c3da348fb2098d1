"""What the one-read operator promises beside its numbers: autograd's corners, compilation, backends, refusals."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import mhar.ops.backend as backend_module
from helpers.reads import draw_read, read_results
from mhar.errors import BackendError, ConfigurationError
from mhar.ops import depth_read
from mhar.ops.backend import resolve_backend
from mhar.ops.operators import depth_read_operator

BF16 = torch.bfloat16


def read(sources, query, norm_weight, num_heads=2, **options):
    return depth_read(sources, query, norm_weight, num_heads=num_heads, backend="triton", **options)


def leaves(count=3, shape=(4,), width=16, dtype=torch.float32, device="cpu", seed=0):
    inputs = draw_read(count, shape, width, 2, dtype, device=device, seed=seed)
    sources = [s.requires_grad_() for s in inputs.sources]
    return sources, inputs.query.requires_grad_(), inputs.norm_weight.requires_grad_(), inputs.dout


def test_nothing_is_saved_without_gradients(device):
    sources, query, norm_weight, _ = leaves(dtype=BF16, device=device)
    arguments = (sources, query, norm_weight, 2, 1e-6, False)
    out, exact, stats, weights = depth_read_operator(*arguments, save=True, return_weights=False)
    assert exact.shape == out.shape
    assert stats.shape == (4, 2, 2)
    assert weights.numel() == 0
    with torch.no_grad():
        _, exact, stats, _ = depth_read_operator(*arguments, save=False, return_weights=False)
        assert exact.numel() == stats.numel() == 0
        assert torch.equal(read(sources, query, norm_weight), out)
    with torch.inference_mode():
        assert torch.equal(read(sources, query, norm_weight), out)
        assert read(sources, query, norm_weight, return_weights=True)[1].shape == (3, 4, 2)


def test_float32_saves_no_second_output(device):
    sources, query, norm_weight, _ = leaves(device=device)
    _, exact, _, _ = depth_read_operator(sources, query, norm_weight, 2, 1e-6, False, True, False)
    assert exact.numel() == 0


def test_second_derivative_raises(device):
    sources, query, norm_weight, _ = leaves(device=device)
    (grad,) = torch.autograd.grad(read(sources, query, norm_weight).square().sum(), query, create_graph=True)
    with pytest.raises(BackendError, match='no second derivative: use backend="reference"'):
        grad.sum().backward()


def test_retained_graph_gives_the_same_gradients_twice(device):
    sources, query, norm_weight, dout = leaves(device=device)
    out = read(sources, query, norm_weight)
    first = torch.autograd.grad(out, [*sources, query, norm_weight], dout, retain_graph=True)
    second = torch.autograd.grad(out, [*sources, query, norm_weight], dout)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_several_losses_in_one_backward(device):
    sources, query, norm_weight, dout = leaves(device=device)
    out = read(sources, query, norm_weight)
    ((out * dout).sum() + (out * 2 * dout).sum()).backward()
    summed = query.grad.clone()
    query.grad = None
    read(sources, query, norm_weight).backward(3 * dout)
    torch.testing.assert_close(summed, query.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("frozen", [(0,), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("stacked", [False, True])
def test_frozen_inputs_get_no_gradient(frozen, stacked, device):
    sources, query, norm_weight, dout = leaves(device=device)
    read(sources, query, norm_weight).backward(dout)
    expected = [s.grad for s in sources], query.grad
    given = [s.detach().requires_grad_(i not in frozen) for i, s in enumerate(sources)]
    query.grad = None
    read(torch.stack(given) if stacked else given, query, norm_weight.detach()).backward(dout)
    assert torch.equal(query.grad, expected[1])
    for i, (tensor, gradient) in enumerate(zip(given, expected[0], strict=True)):
        assert tensor.grad is None if i in frozen else torch.equal(tensor.grad, gradient)


def test_only_the_weights_matter(device):
    """A loss on the weights alone: the mixture's gradient is absent, not zero-filled by the caller."""
    grads = []
    for backend in ("triton", "reference"):
        sources, query, norm_weight, _ = leaves(device=device)
        _, weights = depth_read(sources, query, norm_weight, num_heads=2, return_weights=True, backend=backend)
        weights[0].square().sum().backward()
        grads.append((query.grad, sources[0].grad))
    for ours, reference in zip(*grads, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-6)


def test_output_modified_in_place(device):
    """bfloat16: backward keeps a float32 copy, so the caller may overwrite the read. float32: autograd refuses."""
    sources, query, norm_weight, dout = leaves(dtype=BF16, device=device)
    read(sources, query, norm_weight).backward(dout)
    expected, query.grad = query.grad, None
    read(sources, query, norm_weight).mul_(1).backward(dout)
    assert torch.equal(query.grad, expected)
    sources, query, norm_weight, dout = leaves(device=device)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        read(sources, query, norm_weight).mul_(2).backward(dout)


def test_source_modified_in_place_is_refused(device):
    sources, query, norm_weight, dout = leaves(device=device)
    changed = [sources[0] * 1, *sources[1:]]
    out = read(changed, query, norm_weight)
    with torch.no_grad():
        changed[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(dout)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant, device):
    sources, query, norm_weight, dout = leaves(device=device)
    read(sources, query, norm_weight).backward(dout)
    expected, query.grad = query.grad, None
    checkpoint(lambda *s: read(s, query, norm_weight), *sources, use_reentrant=reentrant).backward(dout)
    assert torch.equal(query.grad, expected)


def test_autocast_leaves_the_arithmetic_alone(device):
    sources, query, norm_weight, _ = leaves(dtype=BF16, device=device)
    expected = read(sources, query, norm_weight)
    with torch.autocast(device, BF16):
        assert torch.equal(read(sources, query, norm_weight), expected)


class TestCompiled:
    def test_operator_is_registered_properly(self, device):
        sources, query, norm_weight, _ = leaves(dtype=BF16, device=device)
        for stacked, given in ((False, sources), (True, [torch.stack(sources).detach().requires_grad_()])):
            torch.library.opcheck(
                depth_read_operator,
                (given, query, norm_weight, 2, 1e-6, stacked, True, False),
                test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
            )

    def test_one_graph_and_no_recompilation(self, device):
        """Different numbers of tokens share one compiled graph without breaks; gradients equal the eager ones."""
        torch._dynamo.reset()
        graphs = CompileCounterWithBackend("aot_eager")

        def function(sources, query, norm_weight):
            return read(sources, query, norm_weight).square() + read(sources[:2], query, norm_weight)

        compiled = torch.compile(function, backend=graphs, fullgraph=True, dynamic=True)
        compilations = []
        for tokens in (3, 8, 5):
            sources, query, norm_weight, dout = leaves(shape=(2, tokens), device=device)
            compiled(sources, query, norm_weight).backward(dout)
            expected, query.grad = query.grad, None
            function(sources, query, norm_weight).backward(dout)
            torch.testing.assert_close(query.grad, expected, rtol=1e-6, atol=1e-7)
            compilations.append(graphs.frame_count)
        assert len(set(compilations)) == 1


class TestBackends:
    def test_auto_on_cpu_is_the_reference(self):
        assert resolve_backend("auto", torch.zeros(2, 8)) == "reference"

    def test_triton_without_a_gpu(self, monkeypatch):
        monkeypatch.setattr(backend_module, "INTERPRETED", False)
        with pytest.raises(BackendError, match=r'on cpu: it needs a CUDA or ROCm GPU.*use backend="reference"'):
            depth_read(torch.zeros(2, 8), torch.zeros(8), torch.ones(8), num_heads=1, backend="triton")

    def test_triton_not_installed(self, monkeypatch):
        monkeypatch.setattr(backend_module, "HAS_TRITON", False)
        with pytest.raises(BackendError, match=r'pip install triton.*use backend="reference"'):
            resolve_backend("triton", torch.zeros(2, 8))

    def test_unsupported_dtype(self, device):
        with pytest.raises(BackendError, match=r'float32, float16, bfloat16, got float64.*use backend="reference"'):
            read(torch.zeros(2, 8, dtype=torch.float64, device=device), *torch.ones(2, 8, device=device))

    def test_unsupported_width(self, device):
        with pytest.raises(BackendError, match=r'widths up to 12288, got 12290.*use backend="reference"'):
            read(torch.zeros(2, 12290, device=device), *torch.ones(2, 12290, device=device))

    def test_old_gpu(self, monkeypatch):
        class Source:
            is_cuda, device, dtype, shape = True, "cuda:0", BF16, (2, 8)

        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 5))
        with pytest.raises(BackendError, match=r"compute capability 8.0 .* got \(7, 5\); or use backend"):
            resolve_backend("triton", Source())
        assert resolve_backend("auto", Source()) == "reference"

    def test_unknown_name(self):
        with pytest.raises(ConfigurationError, match="'tritn'; did you mean 'triton'"):
            resolve_backend("tritn")

    @pytest.mark.gpu
    def test_auto_on_a_gpu(self):
        assert resolve_backend("auto", torch.zeros(2, 8, device="cuda")) == "triton"
        assert resolve_backend("auto", torch.zeros(2, 8, device="cuda", dtype=torch.float64)) == "reference"
        assert resolve_backend("auto", torch.zeros(2, 12290, device="cuda")) == "reference"


@pytest.mark.gpu
class TestOnGpu:
    def test_captured_in_a_cuda_graph(self):
        """Forward and backward replay on new values; the address table is part of the graph."""
        sources, query, norm_weight, dout = leaves(count=40, shape=(65,), width=64, dtype=BF16, device="cuda")

        def step():
            return torch.autograd.grad(read(sources, query, norm_weight), [query, sources[0]], dout)

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        with torch.no_grad():
            for source in sources:
                source.mul_(0.5).add_(0.1)
        graph.replay()
        for ours, expected in zip(captured, step(), strict=True):
            assert torch.equal(ours, expected)

    def test_two_threads(self):
        """Not in the interpreter, which patches triton.language while a kernel runs."""
        cases = [draw_read(3, (999,), 64, 2, BF16, device="cuda", seed=seed) for seed in range(2)]

        def operator(sources, query, norm_weight, num_heads, eps):
            return read(sources, query, norm_weight, num_heads, eps=eps, return_weights=True)

        expected = [read_results(operator, inputs) for inputs in cases]
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda index: read_results(operator, cases[index % 2]), range(20)))
        for index, results in enumerate(found):
            for name, tensor in results.items():
                assert torch.equal(tensor, expected[index % 2][name]), name

    def test_two_streams(self):
        cases = [leaves(count=5, shape=(513,), width=64, device="cuda", seed=seed)[:3] for seed in range(2)]
        expected = [read(*case) for case in cases]
        streams = [torch.cuda.Stream() for _ in cases]
        torch.cuda.synchronize()
        found = []
        for case, stream in zip(cases, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append([read(*case) for _ in range(20)])
        torch.cuda.synchronize()
        for one, many in zip(expected, found, strict=True):
            assert all(torch.equal(one, other) for other in many)

    def test_more_than_2_to_31_elements(self):
        """Offsets are 64-bit, within one source and over all of them: 2.3 G elements, checked at the far end."""
        tokens, width = 1_150_000, 1000
        sources = [torch.randn(tokens, width, device="cuda", dtype=BF16).requires_grad_() for _ in range(2)]
        query, norm_weight = (torch.randn(width, device="cuda") for _ in range(2))
        whole = torch.stack([s.detach() for s in sources])
        assert whole.numel() > 1 << 31
        out, weights = read(whole, query, norm_weight, return_weights=True)
        tail = [s[-3:].detach().clone().requires_grad_() for s in sources]
        expected, expected_weights = read(tail, query, norm_weight, return_weights=True)
        assert torch.equal(out[-3:], expected)
        assert torch.equal(weights[:, -3:], expected_weights)
        read(sources, query, norm_weight).backward(torch.ones_like(out))
        expected.backward(torch.ones_like(expected))
        assert torch.equal(sources[1].grad[-3:], tail[1].grad)

    def test_one_source_of_more_than_2_to_31_elements(self):
        tokens, width = (1 << 31) // 4096 + 5, 4096
        source = torch.randn(tokens, width, device="cuda", dtype=BF16)
        query, norm_weight = torch.zeros(width, device="cuda"), torch.ones(width, device="cuda")
        out = read([source, source], query, norm_weight, num_heads=8)
        torch.testing.assert_close(out[-5:], source[-5:])
