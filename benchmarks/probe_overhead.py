"""What a probe adds to a forward pass, measured in pairs: plain, probed, plain, probed, ...

    OMP_NUM_THREADS=1 python benchmarks/probe_overhead.py --output benchmarks/results/probe-overhead-cpu.json

The models are those of `mhar demo` at its default size. Each pair runs the same batch; the ratio of a pair is free of
slow drifts of the machine. CPU time of the process is the headline, because other processes do not add to it; wall time
is reported as well.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config

from mhar import RoutingConfig, __version__
from mhar.analysis.probe import Probe, ProbeSettings, find_router
from mhar.demo.settings import DemoSettings
from mhar.models import MharConfig, MharForCausalLM

VARIANTS = ("attention_residuals", "mhar", "delta_block_mhar")
CLOCKS: dict[str, Callable[[], float]] = {"cpu_time": time.process_time, "wall_time": time.perf_counter}


def demo_model(variant: str, size: DemoSettings) -> MharForCausalLM:
    """The demo's architecture with routing away from its initial state, which changes no cost."""
    base = Qwen3Config(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        head_dim=size.head_dim,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = MharForCausalLM(MharConfig.from_base(base, RoutingConfig.named(variant))).eval()
    with torch.no_grad():
        for parameter in model.model.router.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@torch.inference_mode()
def measure(variant: str, settings: ProbeSettings, pairs: int) -> dict[str, object]:
    """Relative cost of a probe on one variant: median over pairs and a 95 % bootstrap interval, per clock."""
    size = DemoSettings()
    model = demo_model(variant, size)
    router = find_router(model)
    probe = Probe(router, settings)
    ids = torch.randint(size.vocab_size, (size.batch_size, size.sequence_length))

    def plain() -> None:
        model(input_ids=ids, use_cache=False)

    def probed() -> None:
        with router.observe(probe):
            model(input_ids=ids, use_cache=False)

    for _ in range(3):
        plain(), probed()
    times = {name: np.empty((pairs, 2)) for name in CLOCKS}
    for pair in range(pairs):
        order = (plain, probed) if pair % 2 == 0 else (probed, plain)
        for run in order:
            start = {name: clock() for name, clock in CLOCKS.items()}
            run()
            for name, clock in CLOCKS.items():
                times[name][pair, int(run is probed)] = clock() - start[name]
    return {"variant": variant, "tokens": ids.numel(), **{name: summary(values) for name, values in times.items()}}


def summary(times: np.ndarray) -> dict[str, object]:
    """`times` [pairs, (plain, probed)] in seconds."""
    ratios = times[:, 1] / times[:, 0] - 1
    resampled = np.median(np.random.default_rng(0).choice(ratios, (4000, len(ratios))), axis=1)
    return {
        "plain_ms": round(float(np.median(times[:, 0])) * 1e3, 3),
        "probed_ms": round(float(np.median(times[:, 1])) * 1e3, 3),
        "overhead": round(float(np.median(ratios)), 4),
        "interval_95": [round(float(q), 4) for q in np.quantile(resampled, (0.025, 0.975))],
    }


def main() -> None:
    """Print the table and write the JSON."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--pairs", type=int, default=60)
    options.add_argument("--token-stride", type=int, default=ProbeSettings().token_stride)
    options.add_argument("--output", type=Path)
    arguments = options.parse_args()
    settings = ProbeSettings(token_stride=arguments.token_stride)
    rows = [measure(variant, settings, arguments.pairs) for variant in VARIANTS]
    content = {
        "what": "cost that a probe adds to a forward pass, paired",
        "device": f"{platform.machine()} CPU, {torch.get_num_threads()} thread(s) of {os.cpu_count()} cores",
        "versions": {"mhar": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "token_stride": settings.token_stride,
        "pairs": arguments.pairs,
        "rows": rows,
    }
    for row in rows:
        for name in CLOCKS:
            print(row["variant"], name, row[name])
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
