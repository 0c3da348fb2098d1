"""Documents to shards: content, splits, parallel and interrupted runs, and what is refused."""

import bz2
import gzip
import hashlib
import json
import lzma
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.corpora import WORDS, prepared_text, random_documents, save_tokenizer, write_jsonl
from mhar.cli import main
from mhar.data.prepare import PROGRESS, PrepareConfig, held_out_documents, prepare
from mhar.data.shards import MANIFEST, Manifest, PreparedSplit
from mhar.data.sources import documents, expand
from mhar.data.tokenization import check_same_tokenizer, document_hash, id_dtype, load_tokenizer
from mhar.errors import ConfigurationError, InputError, MharError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def prepared(tmp_path: Path, tokenizer: Path, texts: list[str], **options: Any) -> Manifest:
    source = write_jsonl(tmp_path / "source.jsonl", texts)
    options = {"held_out": 0.2, "workers": 1, "out": tmp_path / "out", **options}
    return prepare(PrepareConfig(sources=(str(source),), tokenizer=str(tokenizer), **options), show_progress=False)


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.glob("*-*.*")) if p.is_file()}


def test_shards_hold_every_document_in_order_with_an_end_of_text(tmp_path: Path, tokenizer: Path) -> None:
    texts = random_documents(60)
    manifest = prepared(tmp_path, tokenizer, texts)
    held_out = held_out_documents(np.array([document_hash(text) for text in texts], np.uint64), 0.2)
    assert 0 < held_out.sum() < len(texts)
    for split, rows in (("train", np.flatnonzero(~held_out)), ("val", np.flatnonzero(held_out))):
        data = PreparedSplit(tmp_path / "out", split)
        expected = [[*(2 + WORDS.index(word) for word in texts[row].split()), 0] for row in rows]
        assert data.read(0, len(data)).tolist() == [token for document in expected for token in document]
        index = data.documents()
        assert index["row"].tolist() == rows.tolist()
        assert index["end"].tolist() == np.cumsum([len(document) for document in expected]).tolist()
        assert manifest.text_bytes(split) == sum(len(texts[row].encode()) for row in rows)


def test_the_split_depends_on_the_text_alone(tmp_path: Path, tokenizer: Path) -> None:
    texts = random_documents(80)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    prepared(tmp_path / "a", tokenizer, texts)
    prepared(tmp_path / "b", tokenizer, texts[::-1] + random_documents(20, seed=1), shard_tokens=100)
    hashes = [set(PreparedSplit(tmp_path / name / "out", "val").documents()["hash"].tolist()) for name in "ab"]
    assert hashes[0] <= hashes[1]


def test_held_out_fraction_is_met() -> None:
    hashes = np.array([document_hash(str(number)) for number in range(20_000)], np.uint64)
    assert held_out_documents(hashes, 0.1).mean() == pytest.approx(0.1, abs=0.01)
    assert not held_out_documents(hashes, 0.0).any()


def test_workers_and_shard_size_change_no_token(tmp_path: Path, tokenizer: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("mhar.data.prepare.BATCH_CHARACTERS", 200)
    texts = random_documents(60)
    results = {}
    for name, options in {"one": {}, "two": {"workers": 2}, "small": {"shard_tokens": 64}}.items():
        (tmp_path / name).mkdir()
        manifest = prepared(tmp_path / name, tokenizer, texts, **options)
        splits = [PreparedSplit(tmp_path / name / "out", split) for split in ("train", "val")]
        results[name] = [split.read(0, len(split)).tolist() for split in splits]
        assert (len(manifest.splits["train"]) > 3) == (name == "small")
    assert results["one"] == results["two"] == results["small"]
    assert digests(tmp_path / "one/out") == digests(tmp_path / "two/out")


def test_an_interrupted_run_continues_to_the_same_bytes(tmp_path: Path, tokenizer: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("mhar.data.prepare.BATCH_CHARACTERS", 200)
    texts = random_documents(60)
    (tmp_path / "whole").mkdir()
    prepared(tmp_path / "whole", tokenizer, texts, shard_tokens=100)

    from mhar.data.shards import ShardWriter

    flush, calls = ShardWriter.flush, []

    def failing(self: ShardWriter) -> None:
        calls.append(self.split)
        if len(calls) == 6:  # the val shard of the third commit: its train shard is already written
            raise KeyboardInterrupt
        flush(self)

    monkeypatch.setattr(ShardWriter, "flush", failing)
    with pytest.raises(KeyboardInterrupt):
        prepared(tmp_path, tokenizer, texts, shard_tokens=100)
    assert not (tmp_path / "out" / MANIFEST).exists()
    with pytest.raises(InputError, match="no finished prepared folder"):
        PreparedSplit(tmp_path / "out")
    monkeypatch.setattr(ShardWriter, "flush", flush)
    position = json.loads((tmp_path / "out" / PROGRESS).read_text())["position"]
    assert position[1] > 0
    prepared(tmp_path, tokenizer, texts, shard_tokens=100)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole/out")


def test_kill_9_leaves_a_folder_that_continues(tmp_path: Path, tokenizer: Path) -> None:
    texts = random_documents(8_000, mean_words=200)
    write_jsonl(tmp_path / "source.jsonl", texts)
    command = [sys.executable, "-m", "mhar.cli", "prepare", str(tmp_path / "source.jsonl"), "--workers=1"]
    command += [f"--tokenizer={tokenizer}", f"--out={tmp_path / 'out'}", "--shard_tokens=100000", "--held_out=0.01"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (tmp_path / "out" / PROGRESS).exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / "out" / PROGRESS).exists()
    assert not (tmp_path / "out" / MANIFEST).exists()
    assert main(command[3:]) == 0
    data = PreparedSplit(tmp_path / "out")
    data.verify()
    total = len(data) + len(PreparedSplit(tmp_path / "out", "val"))
    assert total == sum(len(text.split()) + 1 for text in texts)


def test_a_finished_folder_is_returned_untouched(tmp_path: Path, tokenizer: Path) -> None:
    first = prepared(tmp_path, tokenizer, random_documents(40))
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert prepared(tmp_path, tokenizer, random_documents(40)) == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == times


@pytest.mark.parametrize("change", [{"seed": 1}, {"held_out": 0.3}, {"column": "body"}, {"shard_tokens": 7}])
def test_a_folder_of_other_data_is_refused(tmp_path: Path, tokenizer: Path, change: dict[str, Any]) -> None:
    prepared(tmp_path, tokenizer, random_documents(40))
    with pytest.raises(InputError, match=f"begun with another {next(iter(change))}"):
        prepared(tmp_path, tokenizer, random_documents(40), **change)


def test_validation_sources_are_the_whole_split(tmp_path: Path, tokenizer: Path) -> None:
    val = write_jsonl(tmp_path / "val.jsonl", ["the a", "of"])
    manifest = prepared(tmp_path, tokenizer, random_documents(20), validation=(str(val),), held_out=None)
    assert PreparedSplit(tmp_path / "out", "val").read(0, 9).tolist() == [2, 3, 0, 4, 0]
    assert manifest.held_out == 0
    assert sum(shard.documents for shard in manifest.splits["train"]) == 20


def test_every_kind_of_file_gives_the_same_documents(tmp_path: Path) -> None:
    texts = ["the a", "of — ü", ""]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "c.jsonl.xz").write_bytes(lzma.compress(lines))
    (tmp_path / "d.ndjson.bz2").write_bytes(bz2.compress(lines))
    (tmp_path / "f.txt").write_text(texts[1], encoding="utf-8")
    (tmp_path / "ignored.bin").write_bytes(b"")
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"text": texts}), tmp_path / "e.parquet")
    sources = expand([str(tmp_path)])
    found = [(d.source, d.row, d.text) for d in documents(sources)]
    both = [(row, text) for row, text in enumerate(texts[:2])]
    assert found == [(s, row, text) for s in range(5) for row, text in both] + [(5, 0, texts[1])]
    assert [(d.source, d.row) for d in documents(sources, start=(3, 1))] == [(3, 1), (4, 0), (4, 1), (5, 0)]


def test_a_data_set_is_streamed(tmp_path: Path, monkeypatch: Any) -> None:
    datasets = pytest.importorskip("datasets")
    write_jsonl(tmp_path / "d.jsonl", ["one", "two"])
    load = datasets.load_dataset
    calls: list[Any] = []

    def local(path: str, config: str | None, split: str, streaming: bool) -> Any:
        calls.append((path, config, split, streaming))
        return load("json", data_files=str(tmp_path / "d.jsonl"), split="train", streaming=streaming)

    monkeypatch.setattr(datasets, "load_dataset", local)
    found = [d.text for d in documents(["hf:owner/name:subset"], start=(0, 1))]
    assert found == ["two"]
    assert calls == [("owner/name", "subset", "train", True)]


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"text": "a"}\n{"text"', "line 2: not JSON"),
        ('{"body": "a"}', "line 1: no column 'text'. Found: body"),
        ('{"text": 3}', "column 'text' holds int, not text"),
        ('["a"]', "no column 'text'. Found: list"),
    ],
)
def test_bad_documents_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(InputError, match=message):
        list(documents([str(tmp_path / "bad.jsonl")]))


def test_blank_lines_and_a_byte_order_mark_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "b"}\n\n')
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfplain")
    found = [(d.source, d.row, d.text) for d in documents(expand([str(tmp_path)]))]
    assert found == [(0, 0, "a"), (0, 1, "b"), (1, 0, "plain")]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", b"\xff\xfe", r"a\.txt cannot be read: UnicodeDecodeError"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', r"a\.jsonl, line 2: not JSON in UTF-8"),
        ("a.jsonl", b'{"text": "\\ud800"}', r"a\.jsonl, line 1: column 'text' is not Unicode text"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}' * 50)[:-9], r"a\.jsonl\.gz cannot be read: EOFError"),
        ("a.jsonl.gz", b"plain", r"a\.jsonl\.gz cannot be read: BadGzipFile"),
        ("a.jsonl.xz", b"plain", r"a\.jsonl\.xz cannot be read: LZMAError"),
        ("a.parquet", b"garbage", r"a\.parquet cannot be read: Arrow"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        list(documents([str(tmp_path / name)]))


def test_a_column_of_numbers_is_named(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"text": [None, 3]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="row 2: column 'text' holds int, not text"):
        list(documents([str(tmp_path / "a.parquet")]))


def test_an_unreachable_data_set_is_named(monkeypatch: Any) -> None:
    datasets = pytest.importorskip("datasets")

    def offline(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(InputError, match=r"hf:owner/name cannot be read: ConnectionError: no route"):
        list(documents(["hf:owner/name"]))


def test_the_separator_written_in_a_document_is_text(tmp_path: Path, tokenizer: Path) -> None:
    prepared(tmp_path, tokenizer, ["the <eos> a"], held_out=0.0)
    data = PreparedSplit(tmp_path / "out")
    assert (data.read(0, len(data)) == 0).sum() == 1


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, tokenizer: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/out cannot be written"):
        prepared(tmp_path, tokenizer, ["the"], out=tmp_path / "file/out")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mhar.runfile.write_atomically", full)
    with pytest.raises(InputError, match=r"out cannot be written: .*No space left"):
        prepared(tmp_path, tokenizer, ["the"], held_out=0.0)


def test_unreadable_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file, folder or hf:NAME data set 'nowhere'"):
        expand(["nowhere"])
    (tmp_path / "x.bin").write_text("")
    with pytest.raises(InputError, match=r"x\.bin: unknown kind of file. Known: \.jsonl"):
        list(documents(expand([str(tmp_path / "x.bin")])))


def test_an_empty_data_set_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(InputError, match="the split 'train' came out empty"):
        prepared(tmp_path, tokenizer, [""])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"held_out": 1.0}, "held_out is a fraction"),
        ({"shard_tokens": 0}, "shard_tokens must be positive"),
        ({"workers": -1}, "workers not negative"),
        ({"seed": -1}, "seed must be from 0"),
        ({"end_of_text": "<none>"}, "'<none>' is no token of"),
        ({"validation": ("nowhere",)}, "no file, folder"),
    ],
)
def test_senseless_options_are_refused(tmp_path: Path, tokenizer: Path, options: Any, message: str) -> None:
    with pytest.raises(MharError, match=message):
        prepared(tmp_path, tokenizer, ["the a"], **options)


def test_a_source_given_twice_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    source = str(write_jsonl(tmp_path / "s.jsonl", ["the"]))
    config = PrepareConfig(sources=(source,), validation=(source,), out=tmp_path / "out", tokenizer=str(tokenizer))
    with pytest.raises(InputError, match="given twice"):
        prepare(config, show_progress=False)
    alias = (f"{tmp_path}/../{tmp_path.name}/s.jsonl",)
    config = PrepareConfig(sources=(source,), validation=alias, out=tmp_path / "out", tokenizer=str(tokenizer))
    with pytest.raises(InputError, match="given twice"):
        prepare(config, show_progress=False)
    with pytest.raises(ConfigurationError, match="nothing to prepare"):
        PrepareConfig(out=tmp_path, tokenizer="t")


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no tokenizer in .*none"):
        load_tokenizer(str(tmp_path / "none"))


def test_another_tokenizer_is_noticed(tmp_path: Path, tokenizer: Path) -> None:
    info = prepared(tmp_path, tokenizer, random_documents(40)).tokenizer
    check_same_tokenizer(load_tokenizer(str(tmp_path / "out/tokenizer")), "copy", info)
    other = save_tokenizer(tmp_path / "other", WORDS[::-1])
    with pytest.raises(InputError, match=r"'other' .* is not the one the data was prepared with"):
        check_same_tokenizer(load_tokenizer(str(other)), "other", info)


def test_ids_take_the_narrowest_type() -> None:
    assert [id_dtype(size) for size in (65_535, 65_536, 65_537)] == ["<u2", "<u2", "<u4"]


def test_truncated_altered_and_missing_shards_are_named(tmp_path: Path) -> None:
    folder = prepared_text(tmp_path / "data")
    shard = folder / "train-00000.bin"
    content = shard.read_bytes()
    checksum = PreparedSplit(folder).shards[0].sha256
    shard.write_bytes(content[:-2])
    with pytest.raises(InputError, match=rf"train-00000\.bin is truncated or altered .*SHA-256 was {checksum}"):
        PreparedSplit(folder)
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(InputError, match=rf"train-00000\.bin was altered: .*manifest says {checksum}"):
        PreparedSplit(folder).verify()
    shard.unlink()
    with pytest.raises(InputError, match=r"train-00000\.bin is missing"):
        PreparedSplit(folder)


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    folder = prepared_text(tmp_path / "data")
    values = json.loads((folder / MANIFEST).read_text())
    with pytest.raises(ConfigurationError, match=r"unknown split of .* 'test'"):
        PreparedSplit(folder, "test")
    (folder / MANIFEST).write_text(json.dumps({**values, "format_version": 9}))
    with pytest.raises(InputError, match="format 9; this version reads 1"):
        PreparedSplit(folder)
    (folder / MANIFEST).write_text(json.dumps({**values, "tokens": 9}))
    with pytest.raises(InputError, match="unknown key 'tokens'"):
        PreparedSplit(folder)
    (folder / MANIFEST).write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        PreparedSplit(folder)


def test_the_command_prepares_and_writes_its_options(tmp_path: Path, tokenizer: Path, capsys: Any) -> None:
    source = write_jsonl(tmp_path / "it's, a=b [corpus].jsonl", random_documents(50))
    arguments = [str(source), f"--tokenizer={tokenizer}", f"out={tmp_path / 'out'}", "--held_out=0.1", "--workers=1"]
    assert main(["prepare", *arguments]) == 0
    assert "train: " in capsys.readouterr().out
    assert "held_out: 0.1" in (tmp_path / "out/prepare.yaml").read_text()
    assert main(["prepare", str(tmp_path / "out/prepare.yaml")]) == 0
    assert main(["prepare", *arguments, "--tokeniser=x"]) == 2
    assert "did you mean 'tokenizer'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_corpus_takes_under_three_minutes(tmp_path: Path, shared_data: Path) -> None:
    sources = sorted(map(str, (shared_data / "corpus").glob("train-*.jsonl.xz")))
    config = PrepareConfig(sources=tuple(sources), out=tmp_path, tokenizer=str(shared_data / "tokenizer/smollm2"))
    begin, cpu = time.monotonic(), os.times()
    manifest = prepare(config, show_progress=False)
    assert sum(manifest.tokens(split) for split in manifest.splits) > 26e6
    after = os.times()
    used = sum(after[:4]) - sum(cpu[:4])  # processor seconds: what two idle cores would share
    assert min(time.monotonic() - begin, used / 2 * 1.5) < 180
