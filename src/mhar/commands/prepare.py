"""Turn documents into tokenised, memory-mapped shards."""

import sys
from pathlib import Path

USAGE = """usage: mhar prepare [RUN.yaml] [SOURCE ...] --tokenizer=NAME --out=FOLDER [--name=value ...]

SOURCE: files or folders (JSON lines, parquet, text; also .gz, .bz2, .xz, .zst) or hf:NAME[:CONFIG[:SPLIT]].
Interrupted? The same command continues.

  mhar prepare corpus/train-*.jsonl.xz --validation='[corpus/val.jsonl.xz]' --tokenizer=tok --out=data/corpus

names:
  """


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status."""
    from mhar import runfile
    from mhar.data.prepare import PrepareConfig, prepare

    if not argv or not {"-h", "--help"}.isdisjoint(argv):
        print(USAGE + "\n  ".join(runfile.describe(PrepareConfig)))
        return 0
    named = [word for word in argv if word.startswith("-") or ("=" in word and not Path(word).exists())]
    files = [word for word in argv if word not in named]
    run = files.pop(0) if files and files[0].endswith((".yaml", ".yml")) else None
    if files:
        named.append(f"sources=[{', '.join(map(_quoted, files))}]")
    config = runfile.load(PrepareConfig, run, named)
    try:
        manifest = prepare(config)
    except KeyboardInterrupt:
        print(f"\nInterrupted. What is in {config.out} is kept: the same command continues.", file=sys.stderr)
        return 130
    runfile.save(config, config.out / "prepare.yaml")
    for split, shards in manifest.splits.items():
        documents = sum(shard.documents for shard in shards)
        print(f"{split}: {manifest.tokens(split):,} tokens, {documents:,} documents, {len(shards)} shards")
    return 0


def _quoted(name: str) -> str:
    return "'" + name.replace("'", "''") + "'"
