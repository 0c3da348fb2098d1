"""`metrics.jsonl`: one JSON object a line, appended while training, cut back to the checkpoint when it continues."""

import json
from pathlib import Path
from typing import Any

from mhar.runfile import write_atomically


class MetricsFile:
    """Appends lines to `path`. Lines past `step` come from training that a kill lost: they are dropped first."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        kept = [line for line in read_metrics(path) if line["step"] <= step]
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))

    def append(self, **values: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; none if there is no file. An unfinished last line is left out."""
    if not path.is_file():
        return []
    *lines, _unfinished = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines]
