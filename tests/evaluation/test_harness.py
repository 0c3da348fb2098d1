"""Benchmark tasks through lm-evaluation-harness, on local files, against the harness's own numbers."""

import json
import lzma
from pathlib import Path

import pytest
import yaml

from helpers.tiny_lm import byte_tokenizer, save_checkpoint, tiny_llama, tiny_routed
from mhar.cli import main
from mhar.errors import ConfigurationError, InputError
from mhar.evaluation import harness, records, suites
from mhar.evaluation.harness import HarnessSettings
from mhar.evaluation.loading import LoadedModel, display_name
from mhar.evaluation.suites import SUITES, TASKS
from mhar.evaluation.tasks import loader

lm_eval = pytest.importorskip("lm_eval")

WIKITEXT = (
    " \n = First = \n \n Some words here . \n \n = = Section = = \n \n More words . \n = Second = \n \n Last words . \n"
)
ROWS = {
    "lambada_openai": [{"text": f"the quick brown fox number {word}"} for word in ("one", "two", "three", "four")],
    "piqa": [{"goal": f"goal {i}", "sol1": f"do {i}", "sol2": f"undo {i}", "label": i % 2} for i in range(5)],
    "arc_easy": [
        {
            "question": f"question {i}?",
            "choices": {"text": ["yes", "no", "so"], "label": ["A", "B", "C"]},
            "answerKey": "B",
        }
        for i in range(4)
    ],
    "hellaswag": [{"query": f"a person {i}", "choices": ["runs.", "walks on."], "gold": 1} for i in range(4)],
    "gsm8k": [{"question": f"What is {i} + 1?", "answer": f"One more.\n#### {i + 1}"} for i in range(7)],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of local task data, some of it compressed."""
    folder = tmp_path_factory.mktemp("eval")
    for name, rows in ROWS.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        with lzma.open(folder / f"{name}.jsonl.xz", "wt") as file:
            file.write(text)
    (folder / "wikitext-2-raw-test.txt").write_text(WIKITEXT)
    return folder


def loaded(model, name="tiny"):
    return LoadedModel(model, byte_tokenizer(), {"name": name, "revision": "r"})


def evaluate(model, names, data, **settings):
    chosen = HarnessSettings(data=data, **settings)
    return harness.evaluate_tasks(loaded(model), harness.resolve(names, chosen), chosen)


@pytest.fixture(scope="module")
def evaluation(data):
    return evaluate(tiny_llama(), ["lambada_openai", "piqa", "arc_easy", "hellaswag", "wikitext"], data)


def test_the_numbers_are_the_harnesss_own(evaluation, data):
    names = ["lambada_openai", "piqa", "arc_easy", "hellaswag", "wikitext"]
    own = lm_eval.simple_evaluate(
        model=harness._language_model(loaded(tiny_llama()), HarnessSettings()),
        tasks=names,
        task_manager=harness._manager(data),
        bootstrap_iters=0,
    )
    compared = 0
    for result in evaluation.results:
        expected = own["results"][result.task][f"{result.metric},none"]
        assert result.value == pytest.approx(expected, rel=1e-6), (result.task, result.metric)
        compared += 1
    assert compared == 2 + 2 + 2 + 2 + 3


def test_standard_errors_are_those_of_a_mean(evaluation):
    accuracy = next(r for r in evaluation.results if (r.task, r.metric) == ("piqa", "acc"))
    p, n = accuracy.value, accuracy.n
    assert accuracy.stderr == pytest.approx((p * (1 - p) / (n - 1)) ** 0.5)


def test_items_have_hashes_targets_and_scores(evaluation):
    items = evaluation.records["arc_easy"]
    assert len({item.doc_hash for item in items}) == len({item.prompt_hash for item in items}) == 4
    assert all(len(item.prompt_hash) == 64 and item.target == "1" and item.answer in "012" for item in items)
    assert {"mhar", "lm_eval", "torch", "transformers"} <= evaluation.versions.keys()
    assert evaluation.seeds["fewshot"] == 0


def test_hashes_depend_on_the_prompt_and_not_on_the_model(evaluation, data):
    other = evaluate(tiny_routed(seed=3), ["arc_easy"], data)
    hashes = [[(i.doc_hash, i.prompt_hash) for i in e.records["arc_easy"]] for e in (evaluation, other)]
    assert hashes[0] == hashes[1]
    assert other.records["arc_easy"][0].scores.keys() == {"acc", "acc_norm"}


@pytest.mark.parametrize("variant", ["attention_residuals", "delta_block_mhar"])
def test_routed_models_are_evaluated_like_any_other(variant, data):
    routing = {"block_size": 1} if "block" in variant else None
    results = evaluate(tiny_routed(variant, routing=routing), ["piqa", "wikitext"], data).results
    assert {r.task: r.n for r in results} == {"piqa": 5, "wikitext": 2}


def test_a_limit_is_marked_as_partial(data):
    table = records.markdown([evaluate(tiny_llama(), ["piqa"], data, limit=3)])
    assert table.count("PARTIAL: 3 of 5") == 2


def test_gsm8k_takes_its_examples_from_items_it_does_not_score(data):
    found = evaluate(tiny_llama(), ["gsm8k"], data)
    assert len(found.records["gsm8k"]) == len(ROWS["gsm8k"]) - loader.NUM_GSM8K_SHOTS
    strict = next(r for r in found.results if r.metric == "exact_match,strict-match")
    assert strict.is_primary
    assert strict.num_fewshot == 5
    assert "first 5 test items, not scored" in strict.note


def test_gsm8k_uses_a_training_file_where_there_is_one(data, tmp_path):
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS["gsm8k"]))
    (tmp_path / "gsm8k_train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS["gsm8k"] * 2))
    splits = loader.load_gsm8k(str(tmp_path), "gsm8k.jsonl", "gsm8k_train.jsonl")
    assert (len(splits["train"]), len(splits["test"])) == (14, 7)
    assert suites.note(TASKS["gsm8k"], tmp_path) == ""


def test_wikitext_is_split_at_first_level_headings():
    pages = list(loader.articles(WIKITEXT))
    assert [page.split("\n")[0] for page in pages] == [" = First = ", " = Second = "]
    assert " = = Section = = " in pages[0]
    assert "\n".join(["", *pages]).replace("\n", "") == WIKITEXT.replace("\n", "")[1:]


@pytest.mark.parametrize("name", sorted(path.stem for path in suites.TASK_FOLDER.glob("*.yaml")))
def test_local_task_files_ask_what_the_harness_asks(name):
    """Prompts, targets, metrics and filters are those of the harness; only where the rows come from differs."""
    [own] = Path(lm_eval.__file__).parent.glob(f"tasks/*/{name}.yaml")

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node).split(".")[-1])
    ours, theirs = (yaml.load(p.read_text(), Loader) for p in (suites.TASK_FOLDER / f"{name}.yaml", own))
    inherited = own.parent / theirs["include"] if "include" in theirs else None
    if inherited is not None:
        theirs = {**yaml.load(inherited.read_text(), Loader), **theirs}
    asked = ["output_type", "doc_to_text", "num_fewshot", "filter_list", "generation_kwargs", "process_results"]
    if name != "hellaswag":  # its rows are stored with the harness's clean-up applied
        asked += ["doc_to_target", "doc_to_choice"]
    for key in asked:
        assert ours.get(key) == theirs.get(key), key
    assert [m["metric"] for m in ours["metric_list"]] == [m["metric"] for m in theirs["metric_list"]]
    assert ours["metadata"]["version"] == theirs["metadata"]["version"]


def test_suites_are_the_papers():
    assert {"wikitext", "lambada_openai", "hellaswag", "arc_easy", "arc_challenge", "piqa"} == set(SUITES["pretrain"])
    assert set(SUITES["midtrain"]) == {"mmlu", "gpqa_main_zeroshot", "gsm8k", "minerva_math", "humaneval", "mbpp"}
    assert all(task in TASKS for names in SUITES.values() for task in names)


def test_an_unknown_task_suggests_the_nearest_names(data):
    with pytest.raises(ConfigurationError, match=r"unknown task 'lambda_openai'; nearest: lambada_openai"):
        harness.resolve(["lambda_openai"], HarnessSettings(data=data))


@pytest.mark.parametrize(
    "task, message",
    [
        ("openbookqa", r"no openbookqa\.jsonl in .*; its source is allenai/openbookqa on the Hugging Face hub"),
        ("mmlu", "it has no local file.*source is cais/mmlu"),
        ("gpqa_main_zeroshot", "source is Idavidrein/gpqa"),
        ("humaneval", "executes code that the model writes.*--allow-code-execution"),
        ("mbpp", "executes code"),
    ],
)
def test_what_cannot_run_says_what_it_lacks(task, message, data):
    with pytest.raises(InputError, match=message):
        harness.resolve([task], HarnessSettings(data=data))


def test_a_task_names_the_packages_that_it_lacks(data, monkeypatch):
    monkeypatch.setattr(suites, "_importable", lambda package: package != "math_verify")
    with pytest.raises(InputError, match=r"'minerva_math' needs math_verify: pip install 'lm-eval\[math\]'"):
        harness.resolve(["minerva_math"], HarnessSettings(data=data, download=True))


@pytest.mark.parametrize(
    "path, name",
    [
        ("runs/mhar/final", "mhar-final"),
        ("runs/a/checkpoint-90", "a-checkpoint-90"),
        ("org/model", "model"),
        ("gpt2", "gpt2"),
    ],
)
def test_names_in_tables_say_which_run(path, name):
    assert display_name(path) == name


def test_allowing_code_does_not_provide_the_data(data):
    with pytest.raises(InputError, match="source is openai/openai_humaneval"):
        harness.resolve(["humaneval"], HarnessSettings(data=data, allow_code=True))


@pytest.mark.parametrize(
    "content, message",
    [
        pytest.param(b"", "is empty", id="empty"),
        pytest.param(b'{"goal": "a"', "truncated", id="truncated-line"),
        pytest.param(lzma.compress(b'{"goal": "a"}\n' * 50)[:-20], "truncated", id="truncated-xz"),
    ],
)
def test_damaged_data_is_named(content, message, tmp_path):
    name = "piqa.jsonl" + (".xz" if content.startswith(b"\xfd") else "")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        evaluate(tiny_llama(), ["piqa"], tmp_path)


def test_a_model_without_tokenizer_is_refused(data):
    settings = HarnessSettings(data=data)
    with pytest.raises(InputError, match="tiny has no tokenizer"):
        harness.evaluate_tasks(
            LoadedModel(tiny_llama(), None, {"name": "tiny"}), harness.resolve(["piqa"], settings), settings
        )


def test_the_command_resumes_without_running_finished_tasks_again(data, tmp_path, capsys, monkeypatch):
    model = save_checkpoint(tiny_routed(), tmp_path / "model")
    run = harness.run_task
    ran = []
    monkeypatch.setattr(harness, "run_task", lambda lm, spec, s: (ran.append(spec.name), run(lm, spec, s))[1])
    command = ["evaluate", str(model), "--data", str(data), "--output", str(tmp_path / "out"), "--device", "cpu"]
    assert main([*command, "--tasks", "piqa"]) == 0
    assert main([*command, "--tasks", "piqa,arc_easy"]) == 2
    assert "already holds an evaluation" in capsys.readouterr().err
    assert main([*command, "--tasks", "piqa,arc_easy", "--resume"]) == 0
    assert ran == ["piqa", "arc_easy"]
    assert "lm-evaluation-harness 0." in capsys.readouterr().out
    assert set(records.load(tmp_path / "out").records) == {"piqa", "arc_easy"}
    assert main([*command, "--tasks", "hellaswag", "--resume", "--limit", "1"]) == 2
    assert "limit: None then, 1 now" in capsys.readouterr().err
    assert ran == ["piqa", "arc_easy"]


def test_an_interrupted_run_keeps_its_finished_tasks(data, tmp_path, capsys, monkeypatch):
    model = save_checkpoint(tiny_llama(), tmp_path / "model")
    run = harness.run_task

    def interrupted(lm, spec, settings):
        if spec.name == "arc_easy":
            raise KeyboardInterrupt
        return run(lm, spec, settings)

    monkeypatch.setattr(harness, "run_task", interrupted)
    command = ["evaluate", str(model), "--data", str(data), "--output", str(tmp_path / "out"), "--tasks"]
    assert main([*command, "piqa,arc_easy"]) == 130
    assert list(records.load(tmp_path / "out").records) == ["piqa"]
    assert "--resume runs the others" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "nothing to evaluate"),
        (["--tasks", "piqa", "--limit", "0"], "limit must be a positive integer, got 0"),
        (["--tasks", "piqa", "--device", "cuda:77"], "device 'cuda:77' cannot be used"),
        (["--tasks", "piqa", "--dtype", "float8"], "dtype must be one of auto, float32"),
    ],
)
def test_the_command_refuses_bad_options(arguments, message, data, tmp_path, capsys):
    model = save_checkpoint(tiny_llama(), tmp_path / "model")
    assert main(["evaluate", str(model), "--data", str(data), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_truncated_checkpoint(data, tmp_path, capsys):
    model = save_checkpoint(tiny_llama(), tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert main(["evaluate", str(model), "--data", str(data), "--tasks", "piqa"]) == 2
    assert "cannot be loaded as a causal language model" in capsys.readouterr().err


def test_a_checkpoint_that_is_not_there(data, tmp_path, capsys):
    assert main(["evaluate", str(tmp_path / "nowhere"), "--data", str(data), "--tasks", "piqa"]) == 2
    assert "cannot be loaded as a causal language model" in capsys.readouterr().err


def test_local_rows_may_hold_any_line_separator_and_blank_lines(tmp_path):
    row = {"text": "one\u2028two\u0085three"}
    line = json.dumps(row, ensure_ascii=False)
    (tmp_path / "lambada_openai.jsonl").write_text(f"{line}\n\n{line}\r\n", encoding="utf-8")
    assert loader.rows(tmp_path, "lambada_openai.jsonl") == [row, row]


def test_a_task_without_a_data_folder_says_so():
    with pytest.raises(InputError, match=r"\(no --data folder with piqa\.jsonl was given\)"):
        harness.resolve(["piqa"], HarnessSettings())


def test_a_name_of_ours_and_of_the_harness_is_suggested_once():
    with pytest.raises(ConfigurationError, match=r"nearest: piqa\."):
        suites.expand(["piqaa"], lambda: ["piqa"])


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"seed": -1}, "seed must lie between 0 and"),
        ({"seed": 2**32}, "seed must lie between 0 and"),
        ({"num_fewshot": -1}, "num_fewshot must not be negative, got -1"),
    ],
)
def test_harness_settings_that_make_no_sense(settings, message):
    with pytest.raises(InputError, match=message):
        HarnessSettings(**settings)
