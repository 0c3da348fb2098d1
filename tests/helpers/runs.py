"""Run folders with chosen content, for tests of reports and figures."""

import json
import math
from pathlib import Path

import numpy as np

from mhar.routing import RoutingConfig
from mhar.routing.plan import routing_plan


def routing(variant="mhar", num_heads=2, layers=3, seed=0) -> dict:
    """A `routing.json` with random weights."""
    generator = np.random.default_rng(seed)
    overrides = {"num_heads": num_heads, **({"block_size": 1} if "block" in variant else {})}
    sites = []
    for site in routing_plan(RoutingConfig.named(variant, **overrides), 2 * layers + 1):
        weights = generator.dirichlet(np.ones(len(site.source_names) or 1), size=num_heads).T
        if site.source_names:
            sites.append({"name": site.name, "source_names": site.source_names, "weights": weights.tolist()})
    return {"sites": sites}


def write_run(folder: Path, *, variant="mhar", seed=0, offset=0.0, steps=50, routing_map=None, gates=False, **summary):
    """A finished training run whose held-out loss ends at 2 + offset."""
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(f"model:\n  variant: {variant}\nseed: {seed}\n")
    lines = []
    for step in range(0, steps + 1, 2):
        line = {"step": step, "loss": 2 + offset + 5 * math.exp(-step / 8)}
        if step % 10 == 0:
            line["heldout_loss"] = 2 + offset + 5 * math.exp(-step / 8)
        if gates:
            line["gates"] = {"layers.0.mlp": step / 100, "layers.1.attn": -step / 200}
        lines.append(json.dumps(line))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    values = {"name": folder.name, "variant": variant, "seed": seed, **summary}
    (folder / "summary.json").write_text(json.dumps(values))
    if routing_map is not None:
        (folder / "routing.json").write_text(json.dumps(routing_map))
    return folder


def write_experiment(root: Path) -> Path:
    """Three runs, one of them with a depth map of one head, one with a map of two heads and gates."""
    write_run(root / "baseline", variant="baseline", offset=0.1, tokens_per_s=900.0, peak_memory_gib=1.0)
    write_run(
        root / "single",
        variant="attention_residuals",
        offset=0.05,
        routing_map=routing("attention_residuals", num_heads=1),
        tokens_per_s=700.0,
        peak_memory_gib=1.25,
    )
    write_run(root / "multi", routing_map=routing(), gates=True, tokens_per_s=650.0, peak_memory_gib=1.25)
    return root
