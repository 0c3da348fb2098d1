"""The output folder of a probe: one model, one run."""

import json
from pathlib import Path

from mhar.errors import InputError
from mhar.evaluation.outputs import check_folder

PROBE, ROUTING, INTERVENTIONS = "probe.json", "routing.json", "interventions.json"
TABLE_SUFFIXES = (".csv", ".parquet")


def check(folder: Path, table: str, *, overwrite: bool) -> None:
    """Refuse, before any work, an output folder that cannot be written or that holds a probe already.

    Raises:
        InputError: that, or a table that is no file name ending in .csv or .parquet.
    """
    if Path(table).name != table or Path(table).suffix not in TABLE_SUFFIXES:
        raise InputError(f"the table must be .csv or .parquet, got {table}")
    check_folder(folder)
    present = [name for name in (PROBE, ROUTING, INTERVENTIONS, table) if (folder / name).exists()]
    if present and not overwrite:
        raise InputError(
            f"{folder} already holds {', '.join(present)}: choose --overwrite (which replaces an earlier probe) or"
            " another --output"
        )


def clear(folder: Path) -> None:
    """Remove what an earlier probe wrote, so that no file of it remains beside the new ones."""
    probe = folder / PROBE
    if not probe.is_file():
        return
    for name in (_table_of(probe), INTERVENTIONS, ROUTING, PROBE):
        (folder / name).unlink(missing_ok=True)


def _table_of(probe: Path) -> str:
    """The name of the table beside a `probe.json`; the default's where the file is damaged."""
    try:
        content = json.loads(probe.read_text(encoding="utf-8"))
        return Path(content["table"]).name or "probe.csv"
    except (ValueError, TypeError, KeyError):
        return "probe.csv"
