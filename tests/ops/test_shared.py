"""The shared-pass kernels behind `DepthHistory`: outputs and every gradient against float64, for every form.

Two kinds of inputs: independent sources, and chains of elementwise sublayers, whose sources are similar: there the
softmax gradient cancels, and a coupling term of bfloat16 accuracy would ruin the query's gradient.
"""

import pytest
import torch

from helpers.routed import Case, assert_within_bounds, run

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

CASES = [
    Case(num_sites=1),  # one site, one source: the identity
    Case(num_sites=5, schedule="dense", width=10, num_heads=5),  # heads not a power of two, K = 2
    Case(num_sites=9, levels=(4, 2), tokens=(1, 2)),  # two levels of blocks, the last one short
    Case(num_sites=9, levels=(4, 2), dtype=BF16, norm=True),
    Case(num_sites=7, schedule=3, dtype=F16, width=20, num_heads=1),  # a block that is no power of two; H = 1
    Case(num_sites=8, schedule=4, dtype=BF16, chain=True, width=64),
    Case(num_sites=9, levels=(4, 2), dtype=BF16, chain=True, norm=True),
    Case(num_sites=5, schedule=1, dtype=BF16, width=36, num_heads=3, tokens=(2,)),  # K = 12, every site its own pass
    Case(variant="delta_mhar", num_sites=8, levels=(4, 2)),
    Case(variant="delta_mhar", num_sites=6, schedule=2, dtype=BF16, options={"null_source": True}, norm=True),
    Case(variant="delta_mhar", num_sites=5, schedule="dense", options={"gate": "none"}, chain=True),
    Case(variant="block_mhar", num_sites=8, options={"block_size": 1}),  # M odd in models; a short last block here
    Case(variant="block_mhar", num_sites=7, options={"block_size": 2}, dtype=BF16, norm=True),
    Case(variant="block_mhar", num_sites=7, options={"block_size": 1}, dtype=BF16, chain=True, width=64),
    Case(variant="delta_block_mhar", num_sites=7, options={"block_size": 1}, tokens=(2, 2)),
    Case(variant="delta_block_mhar", num_sites=7, options={"block_size": 1}, dtype=BF16, norm=True),
    Case(variant="delta_block_mhar", num_sites=6, options={"block_size": 2, "null_source": False}, dtype=F16),
    Case(variant="delta_block_mhar", num_sites=7, options={"block_size": 1}, dtype=BF16, chain=True, width=64),
    # The passes of wide heads, at small ones: groups of 10 and more sites take two launches.
    Case(variant="delta_block_mhar", num_sites=23, options={"block_size": 5}, tuning={"group_warps": 1}, tokens=(1,)),
    Case(variant="delta_block_mhar", num_sites=7, options={"block_size": 1}, tuning={"group_warps": 1}, dtype=BF16),
    Case(
        variant="block_mhar", num_sites=7, options={"block_size": 1}, tuning={"group_warps": 1}, dtype=BF16, norm=True
    ),
]

LARGE = [
    Case(num_sites=19, width=1280, num_heads=8, tokens=(256,), dtype=BF16, schedule=8),
    Case(num_sites=73, width=1280, num_heads=8, tokens=(2, 63), dtype=BF16, schedule="auto", norm=True),
    Case(num_sites=19, width=1280, num_heads=8, tokens=(256,), dtype=BF16, levels=(16, 8), chain=True),
    Case(num_sites=25, width=512, num_heads=1, tokens=(4097,), dtype=BF16, schedule="auto"),
    Case(num_sites=25, width=512, num_heads=4, tokens=(4097,), dtype=BF16, schedule="auto", chain=True, norm=True),
    Case(num_sites=9, width=576, num_heads=8, tokens=(63,), dtype=BF16, schedule=4),  # K = 72
    Case(num_sites=9, width=60, num_heads=3, tokens=(63,), dtype=F16, schedule=4),  # K = 20
    Case(num_sites=20, width=60, num_heads=5, tokens=(63,), dtype=F32, levels=(16, 8), norm=True),  # K = 12
    Case(num_sites=12, width=8, num_heads=2, tokens=(1,), dtype=F32, schedule=4),
    Case(num_sites=12, width=8192, num_heads=32, tokens=(3,), dtype=BF16, schedule=4, norm=True),
    Case(num_sites=6, width=12288, num_heads=8, tokens=(3,), dtype=BF16, schedule="auto", norm=True),  # K = 1536
    Case(num_sites=12, width=12288, num_heads=16, tokens=(3,), dtype=F16, schedule=4),  # K = 768
    Case(num_sites=200, width=128, num_heads=2, tokens=(33,), dtype=BF16, schedule="auto"),
    Case(num_sites=200, width=128, num_heads=2, tokens=(33,), dtype=BF16, schedule="dense"),
    Case(variant="delta_mhar", num_sites=49, width=1024, num_heads=8, tokens=(65,), dtype=BF16, schedule="auto"),
    Case(variant="delta_mhar", num_sites=25, width=320, num_heads=5, tokens=(65,), dtype=BF16, schedule="auto",
         options={"null_source": True}, norm=True, chain=True),
    Case(variant="block_mhar", num_sites=49, width=1024, num_heads=8, tokens=(129,), dtype=BF16, norm=True),
    Case(variant="block_mhar", num_sites=49, width=1024, num_heads=8, tokens=(129,), dtype=BF16, chain=True),
    Case(variant="delta_block_mhar", num_sites=65, width=4096, num_heads=8, tokens=(129,), dtype=BF16, norm=True),
    Case(variant="delta_block_mhar", num_sites=65, width=4096, num_heads=8, tokens=(64,), dtype=BF16, chain=True),
    Case(variant="delta_block_mhar", num_sites=81, width=256, num_heads=4, tokens=(33,), dtype=F32,
         options={"block_size": 2}),  # 20 rows: two tiles;
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients_are_within_bounds(case: Case) -> None:
    assert_within_bounds(case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_outputs_and_gradients_are_within_bounds_at_real_sizes(case: Case) -> None:
    first = assert_within_bounds(case)
    second = run(case, "fused")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "case",
    [
        Case(num_sites=6, schedule=4, dtype=BF16, norm=True),
        Case(variant="delta_block_mhar", num_sites=5, options={"block_size": 1}, dtype=BF16, norm=True),
    ],
    ids=str,
)
def test_results_are_equal_bit_for_bit_from_run_to_run(case: Case) -> None:
    first, second = run(case, "fused"), run(case, "fused")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_first_site_is_the_identity() -> None:
    case = Case(num_sites=3, dtype=BF16, chain=True)
    from helpers.routed import inputs

    given = inputs(case)
    assert torch.equal(run(case, "fused", given)["out"][0].cpu(), given.sources[0])
