"""What the page's script draws, as JSON values."""

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from resroute.config import to_dict
from resroute.experiments.inspect.inspection import Inspection, Table
from resroute.experiments.inspect.prompt import TokenReads
from resroute.experiments.inspect.views import bases_of, histories, measures

_DIGITS = 5


def script_data(inspections: Sequence[Inspection], labels: Sequence[str]) -> dict[str, Any]:
    """Everything that the figures show, a run each."""
    pairs = zip(inspections, labels, strict=True)
    return {"runs": [_run(inspection, label) for inspection, label in pairs]}


def _run(inspection: Inspection, label: str) -> dict[str, Any]:
    kinds = inspection.seen["layer_kinds"]
    return {
        "label": label,
        "step": inspection.step,
        "kinds": list(dict.fromkeys(kinds)),
        "details": inspection.seen["details"],
        "sites": [
            {"name": site["name"], "kind": site["kind"], "depth": _short(site["site"] / len(kinds))}
            for site in inspection.seen["sites"]
        ],
        "tables": {name: _table(table) for name, table in inspection.tables.items()} or None,
        "past": [{"step": step, **_table(table)} for step, table in inspection.past.items()],
        "measures": [shortened(to_dict(one)) for one in measures(inspection)],
        "history": [shortened(to_dict(one)) for one in histories(inspection)],
        "importance": [shortened(to_dict(one)) for one in inspection.importance],
        "bases": [shortened(to_dict(one)) for one in bases_of(inspection)],
        "prompt": None if inspection.prompt is None else _prompt(inspection.prompt),
    }


def _table(table: Table) -> dict[str, Any]:
    weights = [[None if w is None else round(w, 4) for w in row] for row in table["weights"]]
    return {"sources": table["sources"], "weights": weights} | (
        {"tokens": table["tokens"]} if "tokens" in table else {}
    )


def _prompt(prompt: TokenReads) -> dict[str, Any]:
    """Weights as bytes, 255 times their roots: exact to 0.004, small ones to much less."""
    packed = b"".join(
        np.rint(255 * np.sqrt(np.array(site.weights))).astype(np.uint8).tobytes()
        for site in prompt.sites
    )
    return {
        "tokens": prompt.tokens,
        "losses": shortened(list(prompt.losses)),
        "sites": [
            {"name": site.name, "sources": site.sources, "depths": site.depths}
            for site in prompt.sites
        ],
        "weights": base64.b64encode(packed).decode("ascii"),
    }


def shortened(value: Any) -> Any:
    """JSON values with numbers of five digits, which is more than they are known to.

    What is not finite is None.
    """
    if isinstance(value, dict):
        return {key: shortened(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [shortened(inner) for inner in value]
    return _short(value) if isinstance(value, float) else value


def _short(value: float) -> float | None:
    """None where JSON has no such number."""
    if not math.isfinite(value):
        return None
    return float(f"{value:.{_DIGITS}g}")
