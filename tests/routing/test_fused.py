"""What the fused path promises around its kernels: order, freezing, checkpointing, threads, memory, refusals."""

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from helpers.compare import assert_close
from helpers.routed import device
from mhar.errors import InputError, OrderError
from mhar.ops.triton.launch import Kernel
from mhar.routing import DepthRouter, RoutingConfig
from mhar.routing.engine import FusedPass, fusible_norm

M, D, H = 5, 16, 2
VARIANTS = ["mhar", "delta_mhar", "block_mhar", "delta_block_mhar"]


class Net(nn.Module):
    """A residual-free stack of small sublayers around a router."""

    def __init__(self, backend: str, variant: str = "mhar", num_sites: int = M, schedule: object = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"block_size": 1} if "block" in variant else {}
        config = RoutingConfig.named(variant, num_heads=H, **options)
        self.embed = nn.Linear(D, D, bias=False)
        self.layers = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(num_sites - 1))
        self.norms = nn.ModuleList(nn.RMSNorm(D, eps=1e-6) for _ in range(num_sites))
        self.router = DepthRouter(num_sites, D, config=config, backend=backend, schedule=schedule)
        with torch.no_grad():
            for parameter in self.router.parameters():
                parameter.add_(0.5 * torch.randn(parameter.shape))
        self.to(device())

    def forward(self, x: Tensor, run: Callable = lambda layer, h: layer(h)) -> list[Tensor]:
        history = self.router.start(self.embed(x))
        reads = []
        for norm, layer in zip(self.norms, self.layers, strict=False):
            reads.append(history.read(norm))
            history.append(run(layer, reads[-1]))
        return [*reads, history.read(self.norms[-1])]


def tokens(count: int = 2, seed: int = 1) -> Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed)).to(device())


def gradients(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def assert_same_gradients(net: Net, reference: Net, bound: float = 1e-5) -> None:
    actual, expected = gradients(net), gradients(reference)
    for name, value in expected.items():
        if value.norm() > 1e-6:
            assert_close(name, actual[name], value, bound)
    assert set(expected) <= set(actual)


def pair(variant: str = "mhar") -> tuple[Net, Net]:
    return Net("triton", variant), Net("reference", variant)


@contextmanager
def counted_launches() -> Iterator[list[str]]:
    names: list[str] = []
    launch = Kernel.__call__

    def record(self: Kernel, *arguments: object) -> None:
        names.append(self.function.__name__)
        launch(self, *arguments)

    with mock.patch.object(Kernel, "__call__", record):
        yield names


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_trains_as_with_the_reference(variant: str) -> None:
    for net in (nets := pair(variant)):
        net(tokens())[-1].sin().sum().backward()
    assert_same_gradients(*nets)


@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_on_several_reads_sum_into_one_backward(variant: str) -> None:
    for net in (nets := pair(variant)):
        reads = net(tokens())
        (reads[1].sin().sum() + reads[3].sin().sum() + reads[-1].sum()).backward()
    assert_same_gradients(*nets)


@pytest.mark.parametrize("variant", ["mhar", "delta_block_mhar"])
def test_a_loss_on_an_early_read_leaves_later_sites_out(variant: str) -> None:
    for net in (nets := pair(variant)):
        net(tokens())[2].sin().sum().backward()
    assert_same_gradients(*nets)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("constant", [(0, 1), (2,), (0, 3)], ids=str)
def test_reads_without_gradients_between_reads_with_them(variant: str, constant: tuple[int, ...]) -> None:
    """Frozen layers often run under no_grad: only what they would have contributed is missing."""
    for net in (nets := pair(variant)):
        history = net.router.start(net.embed(tokens()))
        for site, (norm, layer) in enumerate(zip(net.norms, net.layers, strict=False)):
            with torch.set_grad_enabled(site not in constant):
                history.append(layer(history.read(norm)))
        history.read(net.norms[-1]).sin().sum().backward()
    assert_same_gradients(*nets)


def test_a_history_that_starts_without_gradients_cannot_train() -> None:
    net = Net("triton")
    with torch.no_grad():
        history = net.router.start(tokens())
    with pytest.raises(OrderError, match=r"start\(\) ran under no_grad.*layers.0.attn"):
        history.read()


@pytest.mark.parametrize("frozen", ["router", "embed", "layers", "router embed", "norms"])
def test_frozen_parameters(frozen: str) -> None:
    for net in (nets := pair()):
        for name in frozen.split():
            getattr(net, name).requires_grad_(False)
        net(tokens())[-1].sin().sum().backward()
    assert_same_gradients(*nets)
    assert set(gradients(nets[0])) == set(gradients(nets[1]))


@pytest.mark.parametrize("variant", ["mhar", "delta_mhar"])
def test_detached_sublayers_keep_the_order_of_the_backward_pass(variant: str) -> None:
    for net in (nets := pair(variant)):
        blocked = net.layers[1]
        run = lambda layer, h, blocked=blocked: layer(h.detach()) if layer is blocked else layer(h).detach()  # noqa: E731
        net(tokens(), run)[-1].sin().sum().backward()
    assert_same_gradients(*nets)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_sublayers_stay_on_the_fused_path(reentrant: bool) -> None:
    plain, saving = Net("triton"), Net("triton")
    plain(tokens())[-1].sin().sum().backward()
    with counted_launches() as launches:
        reads = saving(tokens(), lambda layer, h: checkpoint(layer, h, use_reentrant=reentrant))
        reads[-1].sin().sum().backward()
    for name, value in gradients(plain).items():
        assert torch.equal(value, gradients(saving)[name]), name
    assert launches.count("site_forward_kernel") == M  # routing is not recomputed
    assert launches.count("site_backward_kernel") == M


def test_sources_that_are_not_contiguous_and_sources_used_elsewhere() -> None:
    for net in (nets := pair()):
        wide = torch.randn(2, 2 * D, generator=torch.Generator().manual_seed(3)).to(device())
        history = net.router.start(net.embed(tokens()).t().contiguous().t())
        extra = torch.zeros((), device=device())
        for layer in net.layers:
            output = layer(history.read()) * wide[:, ::2]
            extra = extra + output.square().sum()  # the caller's own use of a source
            history.append(output.t().contiguous().t())
        (history.read().t().sin().sum() + extra).backward()
    assert_same_gradients(*nets)


def test_gradients_accumulate_over_micro_batches() -> None:
    for net in (nets := pair()):
        for seed in (1, 2):
            net(tokens(seed=seed))[-1].sin().sum().backward()
    assert_same_gradients(*nets)


def test_two_models_interleaved() -> None:
    alone, first, second = (Net("triton") for _ in range(3))
    alone(tokens())[-1].sin().sum().backward()
    losses = [net(tokens())[-1].sin().sum() for net in (first, second)]
    for loss in losses:
        loss.backward()
    for net in (first, second):
        assert all(torch.equal(v, gradients(net)[n]) for n, v in gradients(alone).items())


@pytest.mark.gpu
def test_two_threads() -> None:
    alone, *nets = (Net("triton") for _ in range(3))
    alone(tokens())[-1].sin().sum().backward()
    threads = [threading.Thread(target=lambda n=n: n(tokens())[-1].sin().sum().backward()) for n in nets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for net in nets:
        assert all(torch.equal(v, gradients(net)[n]) for n, v in gradients(alone).items())


@pytest.mark.gpu
def test_two_streams() -> None:
    alone, *nets = (Net("triton") for _ in range(3))
    alone(tokens(300))[-1].sin().sum().backward()
    x = tokens(300)
    torch.cuda.synchronize()
    for net in nets:
        with torch.cuda.stream(torch.cuda.Stream()):
            net(x)[-1].sin().sum().backward()
    torch.cuda.synchronize()
    for net in nets:
        assert all(torch.equal(v, gradients(net)[n]) for n, v in gradients(alone).items())


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_cuda_graph_of_forward_and_backward(variant: str) -> None:
    eager, net = Net("triton", variant), Net("triton", variant)
    x = tokens(64)
    eager(x)[-1].sin().sum().backward()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        net(x)[-1].sin().sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    net.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        net(x)[-1].sin().sum().backward()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(v, gradients(net)[n]) for n, v in gradients(eager).items())


@pytest.mark.gpu
def test_more_than_two_billion_elements_of_history() -> None:
    router = DepthRouter(9, 4096, 8, backend="triton", device="cuda")
    torch.nn.init.normal_(router.query, std=0.05)
    x = torch.randn(60_000, 4096, device="cuda", dtype=torch.bfloat16)
    assert 9 * x.numel() > 2**31
    with torch.no_grad():
        history = router.start(x)
        for _ in range(8):
            history.append(history.read() * 0.9)
        last = history.read()
        few = router.start(x[-5:])
        for _ in range(8):
            few.append(few.read() * 0.9)
    assert torch.equal(last[-5:], few.read())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("variant", VARIANTS)
def test_without_gradients_nothing_is_kept(mode: Callable, variant: str) -> None:
    net = Net("triton", variant)
    expected = net(tokens())[-1].detach()
    with mode(), mock.patch.object(FusedPass, "begin_backward", side_effect=AssertionError):
        history = net.router.start(net.embed(tokens()))
        for norm, layer in zip(net.norms, net.layers, strict=False):
            history.append(layer(history.read(norm)))
        result = history.read(net.norms[-1])
    assert torch.equal(result, expected)
    assert not result.requires_grad
    assert history._token.grad_fn is None


def test_autocast() -> None:
    for net in (nets := pair()):
        with torch.autocast(device().type, dtype=torch.bfloat16):
            loss = net(tokens())[-1].float().sin().sum()
        loss.backward()
    assert nets[0].router.query.grad.dtype == torch.float32
    assert_same_gradients(*nets, bound=3e-2)


def test_copies_and_pickles_carry_no_state() -> None:
    net = Net("triton")
    expected = net(tokens())[-1]
    for made in (copy.deepcopy(net), pickle.loads(pickle.dumps(net.router))):
        router = made.router if isinstance(made, Net) else made
        assert router.kernels is not net.router.kernels
        net.router = router
        assert torch.equal(net(tokens())[-1], expected)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("fused_norm", [False, True])
def test_a_pass_is_freed_with_its_results(variant: str, fused_norm: bool) -> None:
    net = Net("triton", variant)
    gc.disable()
    try:
        for _ in range(2):
            history = net.router.start(net.embed(tokens()))
            passes = weakref.ref(history._fused)
            for norm, layer in zip(net.norms, net.layers, strict=False):
                history.append(layer(history.read(norm if fused_norm else None)))
            loss = history.read().sin().sum()
            torch.autograd.grad(loss, list(net.layers.parameters()))
            del history, loss
            assert passes() is None
    finally:
        gc.enable()


def test_weights_of_the_fused_path() -> None:
    for variant in VARIANTS:
        nets = pair(variant)
        found = []
        for net in nets:
            history = net.router.start(net.embed(tokens()))
            for layer in net.layers:
                history.append(layer(history.read()))
            history.read()
            found.append([history.weights(s) for s in range(M)])
        for site, (actual, expected) in enumerate(zip(*found, strict=True)):
            assert (actual is None) == (expected is None)
            if expected is not None:
                assert_close(f"{variant} site {site}", actual, expected, 1e-5)


def test_the_backward_pass_releases_the_buffers() -> None:
    for variant in VARIANTS:
        net = Net("triton", variant)
        history = net.router.start(net.embed(tokens()))
        for layer in net.layers:
            history.append(layer(history.read()))
        loss = history.read().sin().sum()
        passes = history._fused.passes
        loss.backward()
        held = [v.numel() for v in vars(passes).values() if isinstance(v, Tensor)]
        assert sum(held) == 0, variant
        with pytest.raises(OrderError, match="before backward"):
            history.weights(1)


# Refusals.


@pytest.mark.parametrize("retain", [False, True])
def test_a_second_backward_pass_is_refused(retain: bool) -> None:
    loss = Net("triton")(tokens())[-1].sin().sum()
    loss.backward(retain_graph=retain)
    with pytest.raises(RuntimeError, match=r"one backward|second time"):
        loss.backward()


def test_double_backward_is_refused() -> None:
    net = Net("triton")
    (gradient,) = torch.autograd.grad(net(tokens())[-1].sin().sum(), net.router.query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_modifying_a_read_in_place_is_refused() -> None:
    net = Net("triton")
    history = net.router.start(net.embed(tokens()))
    hidden = history.read()
    hidden.mul_(2.0)
    history.append(net.layers[0](hidden))
    loss = history.read().sum()
    with pytest.raises(RuntimeError, match=r"read\(\) at site layers.0.attn was modified in place"):
        loss.backward()


def test_modifying_a_source_before_the_next_read_is_refused() -> None:
    net = Net("triton")
    history = net.router.start(net.embed(tokens()))
    output = net.layers[0](history.read())
    history.append(output)
    output.data = output.data
    output.add_(1.0)
    with pytest.raises(InputError, match="modified in place"):
        history.read()


# The norm that follows.


def test_norms_that_add_one_to_their_weight() -> None:
    norm = Gemma3RMSNorm(D, eps=1e-6).to(device())
    nn.init.constant_(norm.weight, 0.3)
    assert fusible_norm(norm, D) == (norm.weight, 1e-6, 1.0)
    router = Net("triton").router
    assert_close("read", router.start(tokens()).read(norm), norm(router.start(tokens()).read()), 1e-6)


class OffsetRMSNorm(nn.RMSNorm):
    """A norm of the user's own, which adds two to its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.weight * (2 + self.weight)


@pytest.mark.parametrize("norm", [OffsetRMSNorm(D, eps=1e-6), Qwen3NextRMSNorm(D, eps=1e-6)], ids=["user", "unknown"])
def test_unknown_norms_are_applied_as_they_are(norm: nn.Module) -> None:
    """The name says nothing about what a class computes."""
    norm.to(device())
    router = Net("triton").router
    assert fusible_norm(norm, D) is None
    assert torch.equal(router.start(tokens()).read(norm), norm(router.start(tokens()).read()))


def test_what_is_not_fused_is_applied_all_the_same() -> None:
    hooked, unknown = nn.RMSNorm(D, eps=1e-6).to(device()), nn.LayerNorm(D, device=device())
    calls: list[int] = []
    hooked.register_forward_hook(lambda *_: calls.append(1))
    router = Net("triton").router
    for norm in (hooked, unknown, lambda x: 2 * x):
        assert fusible_norm(norm, D) is None
        assert torch.equal(router.start(tokens()).read(norm), norm(router.start(tokens()).read()))
    assert calls
