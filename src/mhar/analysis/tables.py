"""The report's tables as HTML."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from mhar.analysis.runfolder import RunFolder
from mhar.analysis.svg import number


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells: strings as they are, numbers formatted, None as a dash."""

    headers: Sequence[str]
    rows: Sequence[Sequence[Any]]


def cell(value: Any) -> str:
    if value is None:
        return "–"
    return number(value) if isinstance(value, (int, float)) else str(value)


def render_table(table: Table) -> str:
    """The table in a box that scrolls sideways by itself on a narrow screen; empty without rows."""
    if not table.rows:
        return ""
    head = "".join(f"<th>{escape(header)}</th>" for header in table.headers)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell(value))}</td>" for value in row) + "</tr>" for row in table.rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def summary_table(runs: Sequence[RunFolder]) -> Table:
    """One row per run that has a summary, one column per scalar that any of them holds, in order of appearance."""
    summarised = [run for run in runs if run.summary]
    keys = dict.fromkeys(
        key
        for run in summarised
        for key, value in run.summary.items()
        if key != "name" and isinstance(value, (str, int, float))
    )
    rows = [[run.name, *(run.summary.get(key) for key in keys)] for run in summarised]
    return Table(["run", *(key.replace("_", " ") for key in keys)], rows)


def evaluation_table(runs: Sequence[RunFolder]) -> str:
    """Task scores with their standard error and n; partial runs are marked in every row that they touch."""
    rows = [
        [run.name, task["task"], task["metric"], task["value"], task.get("stderr"), task["n"], _marks(task)]
        for run in runs
        for task in run.evaluation.get("results", ())
    ]
    versions = {
        f"{run.name}: {', '.join(f'{k} {v}' for k, v in run.evaluation.get('versions', {}).items())}" for run in runs
    }
    note = "".join(f'<p class="note">{escape(version)}</p>' for version in sorted(versions))
    return render_table(Table(["model", "task", "metric", "value", "± s.e.", "n", "complete"], rows)) + note


def _marks(task: dict[str, Any]) -> str:
    total = task.get("available")
    return "yes" if total in (None, task["n"]) else f"PARTIAL: {task['n']} of {number(total)}"


def comparison_tables(run: RunFolder) -> str:
    """One table per comparison file: differences with intervals, discordant counts and adjusted p-values."""
    rows = [
        [
            f"{row['b']} − {row['a']}",
            f"{row['task']} {row['metric']}",
            row["difference"],
            _interval(row),
            None if row.get("only_b") is None else f"{row['only_b']} / {row['only_a']}",
            row["p_value"],
            row["p_holm"],
            f"{row['n']:,} (PARTIAL: {row['partial']})" if row.get("partial") else row["n"],
            row["test"],
        ]
        for row in run.comparison.get("rows", ())
    ]
    level = run.comparison.get("confidence", 0.95)
    headers = ["pair", "score", "difference", f"{level:.0%} interval", "only first / only second right"]
    headers += ["p", "p (Holm)", "n", "test"]
    return f"<h3>{escape(run.name)}</h3>" + render_table(Table(headers, rows))


def _interval(row: dict[str, Any]) -> str | None:
    """None where a single item allows no interval; few items are named beside one."""
    if row["low"] is None:
        return None
    few = " (few items: too narrow)" if row.get("is_narrow") else ""
    return f"[{number(row['low'])}, {number(row['high'])}]{few}"


def probe_tables(run: RunFolder) -> str:
    """The probe's headline numbers and its values by site."""
    totals = [[key.replace("_", " "), value] for key, value in run.probe.get("totals", {}).items()]
    sites = run.probe.get("sites", [])
    keys = dict.fromkeys(key for site in sites for key, value in site.items() if isinstance(value, (int, float)))
    headers = ["site", *(key.replace("_", " ") for key in keys)]
    by_site = render_table(Table(headers, [[site["name"], *(site.get(key) for key in keys)] for site in sites]))
    details = f"<details><summary>by site</summary>{by_site}</details>" if sites else ""
    return f"<h3>{escape(run.name)}</h3>" + render_table(Table(["quantity", "value"], totals)) + details


def intervention_tables(run: RunFolder) -> str:
    """Loss change of every intervention with its paired interval over sequences."""
    rows = [
        [row["intervention"], row["loss_change"], _interval(row), row["n"]] for row in run.interventions.get("rows", ())
    ]
    headers = ["intervention", "loss change (nats per token)", "95% interval", "sequences"]
    return f"<h3>{escape(run.name)}</h3>" + render_table(Table(headers, rows))
