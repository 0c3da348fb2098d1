"""Benchmark tasks and held-out loss of any causal language model, with per-item records."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mhar.evaluation.records import Evaluation

EPILOG = """examples:
  mhar evaluate runs/demo/mhar/checkpoint --tasks pretrain --data eval-data --limit 200
  mhar evaluate gpt2 --tasks lambada_openai,piqa --download
  mhar evaluate MODEL --heldout prepared/ --context 1024 --stride 512

--data names a folder of JSON lines (arc_easy.jsonl, ..., plain or compressed); MHAR_EVAL_DATA is its default."""


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(
        prog="mhar evaluate",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("model", metavar="MODEL", help="checkpoint folder or hub name")
    options.add_argument(
        "--tasks", default="", help="task and suite names, comma-separated (suites: pretrain, midtrain)"
    )
    options.add_argument("--heldout", type=Path, metavar="PREPARED", help="folder written by `mhar prepare`")
    options.add_argument("--output", type=Path, help="evaluation folder (default: evaluations/MODEL)")
    options.add_argument("--name", help="name of the model in tables (default: the folder's)")
    options.add_argument("--revision", help="revision on the hub")
    options.add_argument("--device", help="cpu, cuda, ... (default: cuda where there is one)")
    options.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    options.add_argument("--batch-size", type=int, default=8)
    again = options.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="keep the finished tasks of --output, run the others")
    again.add_argument("--overwrite", action="store_true", help="replace what --output holds")
    tasks = options.add_argument_group("tasks")
    tasks.add_argument("--data", type=Path, default=os.environ.get("MHAR_EVAL_DATA"), help="folder of local task data")
    tasks.add_argument("--limit", type=int, help="first items of each task only; marked as partial in every table")
    tasks.add_argument("--num-fewshot", type=int, help="replaces each task's own number")
    tasks.add_argument("--max-length", type=int, help="longest input in tokens")
    tasks.add_argument("--seed", type=int, default=0)
    tasks.add_argument("--download", action="store_true", help="let the harness fetch data from the hub")
    tasks.add_argument("--allow-code-execution", action="store_true", help="run code that the model writes")
    heldout = options.add_argument_group("held-out loss")
    heldout.add_argument("--split", default="val")
    heldout.add_argument("--context", type=int, default=1024, help="tokens of a window")
    heldout.add_argument("--stride", type=int, help="tokens between windows (default: the context, that is blocks)")
    heldout.add_argument("--max-tokens", type=int, help="score the first tokens only; marked as partial")
    return options


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status."""
    arguments = parser().parse_args(argv)
    from mhar.errors import InputError
    from mhar.evaluation.loading import display_name

    names = [name for name in arguments.tasks.split(",") if name]
    if not names and arguments.heldout is None:
        raise InputError("nothing to evaluate: give --tasks, --heldout or both")
    output = arguments.output or Path("evaluations") / display_name(arguments.model)
    try:
        _run(arguments, names, output)
    except KeyboardInterrupt:
        print(f"\nInterrupted. Finished tasks are in {output}; --resume runs the others.", file=sys.stderr)
        return 130
    return 0


def _run(arguments: argparse.Namespace, names: list[str], output: Path) -> None:
    from dataclasses import replace

    from mhar.evaluation import harness, heldout, records
    from mhar.evaluation.loading import load_model
    from mhar.evaluation.outputs import check_folder

    settings = harness.HarnessSettings(
        data=Path(arguments.data) if arguments.data else None,
        limit=arguments.limit,
        batch_size=arguments.batch_size,
        num_fewshot=arguments.num_fewshot,
        seed=arguments.seed,
        max_length=arguments.max_length,
        download=arguments.download,
        allow_code=arguments.allow_code_execution,
    )
    windows = heldout.HeldoutSettings(
        context=arguments.context,
        stride=arguments.stride,
        batch_size=arguments.batch_size,
        max_tokens=arguments.max_tokens,
    )
    specs = harness.resolve(names, settings) if names else []
    check_folder(output)
    earlier = _earlier(output, arguments.resume, arguments.overwrite)
    loaded = load_model(arguments.model, revision=arguments.revision, device=arguments.device, dtype=arguments.dtype)
    evaluation = harness.empty_evaluation(loaded, settings)
    evaluation = replace(evaluation, name=arguments.name or evaluation.name)
    evaluation = harness.continued(evaluation, earlier) if earlier else evaluation
    if specs:
        evaluation = harness.evaluate_tasks(
            loaded, specs, settings, finished=evaluation, on_task=lambda done: records.save(done, output)
        )
    if arguments.heldout is not None:
        task, items, results = heldout.evaluate_heldout(loaded.model, arguments.heldout, windows, split=arguments.split)
        evaluation = evaluation.with_task(task, items, results)
    records.save(evaluation, output)
    print(records.markdown([evaluation]))
    print(f"\nlm-evaluation-harness {evaluation.versions.get('lm_eval', 'not installed')}; records in {output}")


def _earlier(output: Path, resume: bool, overwrite: bool) -> "Evaluation | None":
    from mhar.errors import InputError
    from mhar.evaluation import records

    if not (output / records.EVALUATION).exists() or overwrite:
        return None
    if not resume:
        raise InputError(f"{output} already holds an evaluation: choose --resume, --overwrite or another --output")
    return records.load(output)
