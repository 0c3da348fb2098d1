"""What the routing of a model learned: weights, disagreement, collinearity, gates, interventions."""

import argparse
import sys
from pathlib import Path

EPILOG = """examples:
  mhar probe runs/demo/mhar/checkpoint --data novel.txt --output probes/mhar
  mhar probe MODEL --data prepared/ --intervene uniform --intervene remove_source:embedding@final

interventions: uniform, one_hot:SOURCE, remove_source:SOURCE, remove_head:H, remove_site:SITE, swap_heads:A,B, freeze
(routing replaced by its token means); each may end in @SITE[,SITE...], names or indices. docs/probe.md
defines every quantity."""


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(
        prog="mhar probe", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("model", metavar="MODEL", help="checkpoint folder or hub name")
    options.add_argument("--data", type=Path, required=True, help="prepared folder, or text files")
    options.add_argument("--split", default="val", help="of a prepared folder")
    options.add_argument("--output", type=Path, help="folder for the results (default: probes/MODEL)")
    options.add_argument("--overwrite", action="store_true", help="replace the probe that --output holds")
    options.add_argument("--context", type=int, default=256, help="tokens of a sequence")
    options.add_argument("--sequences", type=int, default=64, help="sequences at most")
    options.add_argument("--batch-size", type=int, default=8)
    options.add_argument("--slices", type=int, help="slices of a single-head query (default: 4)")
    options.add_argument("--null-queries", type=int, default=1, help="random queries of matched norm, averaged")
    options.add_argument("--token-stride", type=int, default=8, help="all but mean weights on every n-th token")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--table", default="probe.csv", help="name of the tidy table: .csv or .parquet")
    options.add_argument("--intervene", action="append", default=[], metavar="SPEC", help="measure an intervention")
    options.add_argument("--revision")
    options.add_argument("--device")
    options.add_argument("--dtype", default="auto")
    return options


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status."""
    arguments = parser().parse_args(argv)
    from mhar.evaluation.loading import display_name

    output = arguments.output or Path("probes") / display_name(arguments.model)
    try:
        _run(arguments, output)
    except KeyboardInterrupt:
        print("\nInterrupted; nothing was written.", file=sys.stderr)
        return 130
    return 0


def _run(arguments: argparse.Namespace, output: Path) -> None:
    import json

    from tqdm import tqdm

    from mhar.analysis import intervention, probe_folder, probe_result
    from mhar.analysis.probe import DEFAULT_SLICES, Probe, ProbeSettings, find_router, observe_all
    from mhar.analysis.probe_data import token_batches
    from mhar.errors import InputError
    from mhar.evaluation.harness import versions
    from mhar.evaluation.loading import load_model
    from mhar.runfile import write_atomically

    probe_folder.check(output, arguments.table, overwrite=arguments.overwrite)
    loaded = load_model(arguments.model, revision=arguments.revision, device=arguments.device, dtype=arguments.dtype)
    router = find_router(loaded.model)
    if arguments.slices is not None and router.num_heads > 1:
        raise InputError(
            f"--slices cuts the query of a single routing head, this model has {router.num_heads} heads: leave it out"
        )
    settings = ProbeSettings(
        num_slices=DEFAULT_SLICES if arguments.slices is None else arguments.slices,
        num_null_queries=arguments.null_queries,
        token_stride=arguments.token_stride,
        seed=arguments.seed,
    )
    probe = Probe(router, settings)
    changes = intervention.parse_all(loaded.model, arguments.intervene)
    batches = list(
        token_batches(
            arguments.data,
            loaded.tokenizer,
            context=arguments.context,
            batch_size=arguments.batch_size,
            num_sequences=arguments.sequences,
            split=arguments.split,
        )
    )
    observe_all(loaded.model, [probe], (batch.to(loaded.model.device) for batch in tqdm(batches, desc="probing")))
    result = probe.result()
    rows, routing = result.pop("rows"), result.pop("routing")
    data = {"path": str(arguments.data), "context": arguments.context, "sequences": sum(map(len, batches))}
    source = {"model": loaded.info, "data": data}
    content = {"format_version": 1, **source, "versions": versions(), "table": arguments.table, **result}
    found = intervention.effects(loaded.model, batches, changes, seed=arguments.seed) if changes else []
    output.mkdir(parents=True, exist_ok=True)
    probe_folder.clear(output)
    probe_result.write_table(rows, output / arguments.table)
    if found:
        effects = {**intervention.to_dict(found), **source}
        write_atomically(output / probe_folder.INTERVENTIONS, json.dumps(effects, indent=1) + "\n")
        print(intervention.markdown(found))
    write_atomically(output / probe_folder.ROUTING, json.dumps(routing) + "\n")
    write_atomically(output / probe_folder.PROBE, json.dumps(content, indent=1) + "\n")
    for name, value in result["totals"].items():
        print(f"{name.replace('_', ' '):<32} {value if isinstance(value, int) else format(value or 0, '.5f')}")
    print(f"\nresults in {output}; `mhar report {output}` draws them")
