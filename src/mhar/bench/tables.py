"""Markdown tables of the results."""

from typing import Any


def markdown(rows: list[list[str]]) -> str:
    """A table whose first row is the head."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def routing_table(result: dict[str, Any]) -> str:
    """Times, memory and bandwidth of every implementation on every shape, then what was not run and why."""
    head = [
        "shape", "tokens", "H", "implementation", "ms", "forward", "backward", "spread", "eager wall", "launch",
        "x authors'", "peak GiB", "model GB", "share of copy",
    ]  # fmt: skip
    quoted = {_key(row): row["ms"] for row in result["rows"] if row["implementation"] == "authors"}
    rows = [head, *(_routing_row(row, quoted.get(_key(row))) for row in result["rows"])]
    return "\n".join([_heading(result), markdown(rows), _not_run(result)])


def _routing_row(row: dict[str, Any], authors: float | None) -> list[str]:
    name = row["implementation"]
    if row.get("source"):
        name += f" ({row['source']})"
    elif not row["cuda_graph"]:
        name += " (no graph)"
    faster = "" if authors is None or row["implementation"] == "authors" else f"{authors / row['ms']:.1f}"
    figures = [
        _number(row.get(field), digits)
        for field, digits in (
            ("ms", 3), ("forward_ms", 3), ("backward_ms", 3), ("spread_ms", 3), ("eager_ms", 2), ("launch_ms", 2),
        )
    ]  # fmt: skip
    share = row.get("share_of_copy_bandwidth")
    return [
        row["shape"], f"{row['tokens']:,}", str(row["num_heads"]), name, *figures, faster,
        _number(row.get("peak_gib"), 2), _number(row.get("model_gb"), 2), "" if share is None else f"{share:.0%}",
    ]  # fmt: skip


def step_table(result: dict[str, Any]) -> str:
    """Steps of both variants, and MHAR relative to the baseline."""
    head = ["shape", "tokens", "variant", "mode", "ms", "spread", "tokens/s", "peak GiB"]
    rows = [head]
    for row in result["rows"]:
        figures = [_number(row["ms"], 2), _number(row["spread_ms"], 2), f"{row['tokens_per_s']:,.0f}"]
        rows.append(
            [row["shape"], f"{row['tokens']:,}", row["variant"], _mode(row), *figures, f"{row['peak_gib']:.2f}"]
        )
    relative = [["shape", "tokens", "mode", "throughput", "added ms", "peak memory"]]
    for row in result["relative"]:
        memory = "" if row["peak_memory"] is None else f"{row['peak_memory']:.3f}x"
        figures = [f"{row['throughput']:.3f}x", f"{row['added_ms']:.2f}", memory]
        relative.append([row["shape"], f"{row['tokens']:,}", _mode(row), *figures])
    title = "MHAR relative to the additive baseline:\n"
    return "\n".join([_heading(result), markdown(rows), title, markdown(relative), _not_run(result)])


def _mode(row: dict[str, Any]) -> str:
    return ("compiled" if row["compiled"] else "eager") + (", CUDA graph" if row["cuda_graph"] else "")


def _heading(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    commit = f", commit {result['commit']}" if result["commit"] else ""
    lines = [f"{result['device']}, {result['date']}{commit}; {versions}."]
    if result.get("copy_bandwidth_gb_s"):
        lines.append(f"Copy bandwidth measured in the same run: {result['copy_bandwidth_gb_s'] / 1e3:.2f} TB/s.")
    return "\n\n".join([*lines, *result.get("notes", [])]) + "\n"


def _not_run(result: dict[str, Any]) -> str:
    if not result["not_run"]:
        return ""
    rows = [["shape", "tokens", "implementation", "why"]]
    for entry in result["not_run"]:
        rows.append([entry["shape"], f"{entry['tokens']:,}", entry.get("implementation", "mhar"), entry["reason"]])
    return "Not run:\n\n" + markdown(rows)


def _key(row: dict[str, Any]) -> tuple[str, int]:
    return row["shape"], row["tokens"]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"
