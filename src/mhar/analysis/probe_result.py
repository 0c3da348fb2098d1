"""From a probe's running sums to numbers: totals, values by site, a tidy table, and maps for reports."""

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mhar.errors import InputError
from mhar.evaluation.loading import require
from mhar.runfile import write_atomically

if TYPE_CHECKING:
    from mhar.analysis.probe import Probe, SiteSums

COLUMNS = ("site", "head", "source", "weight", "deviation", "null_weight", "null_deviation", "top_share")


def summarise(probe: "Probe") -> dict[str, Any]:
    """`{"settings", "totals", "sites", "rows", "routing"}`; `rows` is tidy (one per site, head and source)."""
    if not probe.sums:
        raise InputError("the probe saw no forward pass of the model: was it observing the router?")
    sites = [_site(probe, name, sums) for name, sums in probe.sums.items()]
    return {
        "settings": {
            "num_slices": probe.num_slices if probe.num_heads == 1 else None,
            "num_null_queries": probe.settings.num_null_queries,
            "token_stride": probe.settings.token_stride,
            "seed": probe.settings.seed,
            "num_heads": probe.num_heads,
            "variant": probe.router.config.name,
        },
        "totals": _totals(probe, sites),
        "sites": [{key: value for key, value in site.items() if key != "rows"} for site in sites],
        "rows": [row for site in sites for row in site["rows"]],
        "routing": _routing(probe),
    }


def mean_weights(probe: "Probe", name: str, half: int | None = None) -> Tensor:
    """[N, H]: token means at a site, over everything or one half of the batches."""
    maps = [m for m in (probe.halves if half is None else (probe.halves[half],)) if name in m.sums]
    return sum((m.sums[name] for m in maps), torch.tensor(0.0)) / sum(m.counts[name] for m in maps)


def deviations(weights: Tensor) -> Tensor:
    """Each head minus the mean over heads: [N, H]."""
    return weights - weights.mean(dim=-1, keepdim=True)


def correlation(first: Sequence[Tensor], second: Sequence[Tensor]) -> float | None:
    """Pearson correlation of all entries; None where one side does not vary."""
    a, b = (np.concatenate([t.double().flatten().numpy() for t in side]) for side in (first, second))
    spread = float(a.std() * b.std())
    return float(((a - a.mean()) * (b - b.mean())).mean() / spread) if spread > 1e-12 else None


def _site(probe: "Probe", name: str, sums: "SiteSums") -> dict[str, Any]:
    router = probe.router
    row = router.site_rows[router.site_index(name)]
    assert row is not None
    assert router.query is not None
    weights = mean_weights(probe, name)
    sources = next(m.source_names[name] for m in probe.halves if name in m.source_names)
    site: dict[str, Any] = {
        "name": name,
        "num_sources": len(sources),
        "query_norm": float(router.query[row].detach().float().norm()),
    }
    if router.gate is not None:
        site["gate"] = float(router.gate[row].detach())
    if len(sources) == 1:
        return {**site, "rows": _rows(name, sources, weights, None, torch.ones(1, probe.num_heads))}
    entropies = torch.as_tensor(sums.entropy).double().cpu() / sums.num_tokens
    shares = torch.as_tensor(sums.top_counts).double().cpu() / sums.num_tokens
    site["entropy"] = float(entropies.mean())
    site["relative_entropy"] = site["entropy"] / math.log(len(sources))
    site["top_source"] = sources[int(weights.mean(dim=-1).argmax())]
    site["collinearity"] = float(sums.collinearity) / sums.num_tokens
    null = None
    if probe.num_heads == 1:
        values = torch.as_tensor(sums.disagreement).double().cpu() / sums.num_tokens
        for form, suffix in enumerate(("", "_rescaled")):
            trained, null_value = float(values[form, 0]), float(values[form, 1:].mean())
            site[f"width_disagreement{suffix}"] = trained
            site[f"null_width_disagreement{suffix}"] = null_value
            site[f"learned_excess{suffix}"] = trained - null_value
    else:
        null = torch.as_tensor(sums.null_weights).double().cpu() / sums.num_tokens
        site["head_disagreement"] = float(sums.head_disagreement) / sums.num_tokens
        site["null_head_disagreement"] = float(sums.null_head_disagreement) / sums.num_tokens
        site["deviation_rms"] = float(deviations(weights).square().mean().sqrt())
        site["null_deviation_rms"] = float(deviations(null).square().mean().sqrt())
    return {**site, "rows": _rows(name, sources, weights, null, shares)}


def _rows(name: str, sources: Sequence[str], weights: Tensor, null: Tensor | None, shares: Tensor) -> list[list[Any]]:
    deviation = deviations(weights)
    null_deviation = None if null is None else deviations(null)
    return [
        [
            name,
            head,
            source,
            float(weights[n, head]),
            float(deviation[n, head]),
            None if null is None else float(null[n, head]),
            None if null_deviation is None else float(null_deviation[n, head]),
            float(shares[n, head]),
        ]
        for head in range(weights.shape[1])
        for n, source in enumerate(sources)
    ]


def _totals(probe: "Probe", sites: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the sites with more than one source."""
    mixed = [site for site in sites if site["num_sources"] > 1]
    keys = dict.fromkeys(key for site in mixed for key, value in site.items() if isinstance(value, float))
    first = probe.halves[1]  # the first batch has number 1
    totals: dict[str, Any] = {
        "num_tokens": sum(m.counts.get(sites[0]["name"], 0) for m in probe.halves),
        "num_sites": len(sites),
        **{key: float(np.mean([site[key] for site in mixed])) for key in keys},
    }
    if mixed:
        totals["collinearity_of_all_sources"] = mixed[-1]["collinearity"]
    if probe.num_heads > 1 and mixed and probe.num_batches > 1 and first.sums:
        halves = [[deviations(mean_weights(probe, site["name"], half)) for site in mixed] for half in (1, 0)]
        totals["split_half_correlation"] = correlation(*halves)
    return totals


def _routing(probe: "Probe") -> dict[str, Any]:
    """In the form of `routing.json`."""
    return {
        "sites": [
            {
                "name": name,
                "source_names": list(next(m.source_names[name] for m in probe.halves if name in m.source_names)),
                "weights": mean_weights(probe, name).tolist(),
                "num_tokens": sum(m.counts.get(name, 0) for m in probe.halves),
            }
            for name in probe.sums
        ]
    }


def write_table(rows: Sequence[Sequence[Any]], path: Path) -> None:
    """The tidy table as CSV, or as parquet where the name ends so."""
    if path.suffix == ".parquet":
        pyarrow, parquet = require("pyarrow", "analysis"), require("pyarrow.parquet", "analysis")
        table = pyarrow.table({name: [row[i] for row in rows] for i, name in enumerate(COLUMNS)})
        temporary = path.with_name(path.name + ".partial")
        parquet.write_table(table, temporary)
        temporary.replace(path)
        return
    if path.suffix != ".csv":
        raise InputError(f"the table must be .csv or .parquet, got {path.name}")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(["" if value is None else value for value in row] for row in rows)
    write_atomically(path, text.getvalue())
