"""The byte model: how much memory a scheme must move for one chain, forward and backward.

Unit: a row, one source of the micro-batch in its storage dtype (tokens x D x 2 bytes in bfloat16). Arrays of the size
of the logits are left out (about 5 %). The model and its check against measurements: docs/kernels.md.
"""

from mhar.bench.shapes import RoutingShape
from mhar.ops.schedule import SublayerSchedule, sublayer_schedule
from mhar.routing import routing_plan

# Rows that a peer moves for one read of N sources, forward plus backward (public sources of the versions measured).
PEER_ROWS = {
    "authors": lambda n: (n + 3) + (6 * n + 12),
    "fla": lambda n: (n + 1) + (3 * n + 5) + 3 * n,
    "fla-gluon": lambda n: (n + 1) + (2 * n + 1) + 3 * n,
    "liger": lambda n: (4 * n + 1) + (3 * n + 1) + 3 * n,
    "fast-attnres": lambda n: (n + 1) + (2 * n + 7) + 3 * n,
    "mhar-single": lambda n: (n + 3) + (2 * n + 3) + 3 * n,
}


def chain_bytes(shape: RoutingShape, implementation: str, schedule: tuple[int, int] | None) -> float | None:
    """Bytes of one forward and backward; None where no model exists (eager, torch.compile).

    `schedule` is (block, inner) of the fused path, (0, 0) for the dense form.
    """
    row = shape.tokens * shape.width * 2
    if implementation in PEER_ROWS:
        rows = PEER_ROWS[implementation]
        return row * sum(rows(len(site.source_names)) for site in routing_plan(shape.config, shape.num_sites))
    if schedule is None or shape.config.sources == "block":
        return row * block_rows(shape) if implementation == "mhar" and shape.config.sources == "block" else None
    return row * sublayer_rows(sublayer_schedule(0, shape.num_sites, "auto", schedule))


def sublayer_rows(schedule: SublayerSchedule) -> float:
    """Rows of the fused path over sublayer sources.

    Per site forward: newest source read and stored, own block's rows, partial mix (float32), result and its residual
    (half a row). Per row backward: gradient read and stored, result and residual, own row, the gradients of later sites
    of its block, gathered gradient (float32), source gradient. A pass reads its rows once and writes one float32
    partial per site (forward) or one float32 gradient per row (backward). The query's gradient reads every row once.
    """
    last = schedule.last
    rows = 0.0
    for s in range(schedule.first, last):
        forward = schedule.forward(s)
        if forward is not None:
            rows += forward.row1 - forward.row0 + 2 * (1 + forward.merge) * (forward.site1 - forward.site0)
        rows += 2 + (s - schedule.own_start(s)) + 2 * (schedule.own_start(s) > 0) + 1.5
        for gather in schedule.backward(s, last):
            rows += gather.site1 - gather.site0 + (3 + 2 * gather.merge) * (gather.row1 - gather.row0)
        rows += 2 + 1.5 + 1 + (schedule.own_end(s) - s - 1) + 2 * schedule.gathered(s, last) + 1
    return rows + last


def block_rows(shape: RoutingShape) -> float:
    """Rows of the fused path over block sources: the least that sharing one pass per group of sites must move.

    A group reads its N rows once forward and once backward, where it also adds to their float32 gradients; each of its
    sites reads and writes the stream, reads its sublayer's output and writes its result, both ways.
    """
    plan = routing_plan(shape.config, shape.num_sites)
    groups = {site.num_rows for site in plan if site.num_rows}
    return sum(2 * n + 4 * n for n in groups) + 8 * len(plan)
