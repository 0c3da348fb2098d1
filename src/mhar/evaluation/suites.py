"""Which tasks exist, where their data comes from, and the paper's two suites."""

import difflib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from mhar.errors import ConfigurationError, InputError
from mhar.evaluation.tasks import loader

TASK_FOLDER = Path(__file__).parent / "tasks"
MATH_SUBJECTS = ("algebra", "counting_and_prob", "geometry", "intermediate_algebra", "num_theory", "prealgebra")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """One task.

    Attributes:
        primary: the metric that comparisons test.
        file: name of the local data; empty where only the harness's own definition (and a network) can run it.
        source: where the data is published, for error messages.
        members: names in the harness whose items are pooled; by default the task itself.
        executes_code: scoring runs code that the model wrote.
        requires: packages beyond the `eval` extra.
    """

    name: str
    primary: str
    source: str
    file: str = ""
    members: tuple[str, ...] = ()
    executes_code: bool = False
    requires: tuple[str, ...] = ()


TASKS = {
    spec.name: spec
    for spec in (
        TaskSpec(
            name="wikitext",
            primary="word_perplexity",
            file="wikitext-2-raw-test.txt",
            source="EleutherAI/wikitext_document_level",
        ),
        TaskSpec(name="lambada_openai", primary="acc", file="lambada_openai.jsonl", source="EleutherAI/lambada_openai"),
        TaskSpec(name="hellaswag", primary="acc_norm", file="hellaswag.jsonl", source="Rowan/hellaswag"),
        TaskSpec(name="arc_easy", primary="acc", file="arc_easy.jsonl", source="allenai/ai2_arc"),
        TaskSpec(name="arc_challenge", primary="acc_norm", file="arc_challenge.jsonl", source="allenai/ai2_arc"),
        TaskSpec(name="piqa", primary="acc", file="piqa.jsonl", source="baber/piqa"),
        TaskSpec(name="openbookqa", primary="acc_norm", file="openbookqa.jsonl", source="allenai/openbookqa"),
        TaskSpec(name="gsm8k", primary="exact_match,strict-match", file="gsm8k.jsonl", source="openai/gsm8k"),
        TaskSpec(name="mmlu", primary="acc", source="cais/mmlu"),
        TaskSpec(name="gpqa_main_zeroshot", primary="acc_norm", source="Idavidrein/gpqa (asks for consent)"),
        TaskSpec(
            name="minerva_math",
            primary="math_verify",
            source="EleutherAI/hendrycks_math",
            members=tuple(f"minerva_math_{subject}" for subject in (*MATH_SUBJECTS, "precalc")),
            requires=("sympy", "math_verify", "antlr4"),
        ),
        TaskSpec(name="humaneval", primary="pass@1", source="openai/openai_humaneval", executes_code=True),
        TaskSpec(name="mbpp", primary="pass_at_1", source="google-research-datasets/mbpp", executes_code=True),
    )
}

SUITES = {
    "pretrain": ("wikitext", "lambada_openai", "hellaswag", "arc_easy", "arc_challenge", "piqa"),
    "midtrain": ("mmlu", "gpqa_main_zeroshot", "gsm8k", "minerva_math", "humaneval", "mbpp"),
}


def expand(names: Sequence[str], others: Callable[[], Collection[str]]) -> list[TaskSpec]:
    """The tasks behind task and suite names, each once.

    Args:
        others: names that the harness itself knows, asked for only when a name is not ours.

    Raises:
        ConfigurationError: an unknown name; the nearest names of ours and of the harness are suggested.
    """
    specs: dict[str, TaskSpec] = {}
    for name in (member for given in names for member in SUITES.get(given, (given,))):
        specs[name] = TASKS[name] if name in TASKS else _foreign(name, others())
    return list(specs.values())


def _foreign(name: str, known: Collection[str]) -> TaskSpec:
    if name in known:
        return TaskSpec(name=name, primary="", source="the harness's own definition")
    ours = [*TASKS, *SUITES]
    close = difflib.get_close_matches(name, list(dict.fromkeys([*ours, *known])), n=5, cutoff=0.5)
    hint = f"; nearest: {', '.join(close)}" if close else ""
    raise ConfigurationError(f"unknown task {name!r}{hint}. Tasks and suites with local files: {', '.join(ours)}")


def check_runnable(spec: TaskSpec, data: Path | None, *, download: bool, allow_code: bool) -> None:
    """Raise before any model is loaded when a task cannot run, and say what it lacks.

    Raises:
        InputError: local data missing and no leave to download it; code execution not allowed; a package missing.
    """
    if spec.executes_code and not allow_code:
        raise InputError(
            f"task {spec.name!r} executes code that the model writes: run it where that is safe, with"
            " --allow-code-execution"
        )
    if missing := [package for package in spec.requires if not _importable(package)]:
        raise InputError(f"task {spec.name!r} needs {', '.join(missing)}: pip install 'lm-eval[math]'")
    if download or (spec.file and data is not None and loader.find(data, spec.file)):
        return
    raise InputError(
        f"the data of task {spec.name!r} is missing ({_what_lacks(spec, data)}); its source is {spec.source} on the"
        " Hugging Face hub: allow fetching it with --download"
    )


def _what_lacks(spec: TaskSpec, data: Path | None) -> str:
    if not spec.file:
        return "it has no local file"
    return f"no --data folder with {spec.file} was given" if data is None else f"no {spec.file} in {data}"


def note(spec: TaskSpec, data: Path | None) -> str:
    """What a reader of the results must know about how a task was run."""
    if spec.name == "gsm8k" and data is not None and not loader.find(data, "gsm8k_train.jsonl"):
        return f"few-shot examples are the first {loader.NUM_GSM8K_SHOTS} test items, not scored"
    return ""


def _importable(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None
