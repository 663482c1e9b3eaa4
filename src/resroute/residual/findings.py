"""What a health check has found, and the numbers that it looks at."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from resroute.config import UserError, documented
from resroute.residual.base import Policy, site_name
from resroute.residual.capture import Capture
from resroute.residual.observe import Observation
from resroute.residual.routed import RoutedPolicy
from resroute.residual.tally import number

Severity = Literal["note", "warning"]
LEAST_STEPS = 100
"""Below, parameters may be where they started for lack of time: warm-up alone takes as long."""
MOST = 0.5
"""Share of sites from which on a finding is of the model, not of a few sites."""


@documented
@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is not as it is in a healthy model; see `health`."""

    check: str
    """Which check: `dead mixing`, `closed gates`, `idle layers`, `unused details`,
    `dominating details`, `collapsed mixing`, `growing sources`, `detail bias drift`."""
    severity: Severity
    """`warning`: the method, or a part of the model, most likely does nothing, or training is about
    to fail. `note`: unusual, and possibly right."""
    where: str
    """Which sites, layers or sources."""
    saw: str
    """What was seen, with numbers."""
    why: str
    """Why it matters."""
    remedy: str
    """What to try."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """Numbers of a model in the one form that checks take; None where they are not known.

    Attributes:
        policy: The model's.
        steps: Training steps that it has behind it.
        updates: RMS of each site's update, times the coefficient that it is written with.
        reads: RMS of what each site reads, the readout last.
        sizes: RMS of finished sources.
        weights: Mean depth weights by source, of each site and the readout.
        effective: Mean effective number of sources, by site.
        means: Over reads that mix: entropy, effective_sources, detail_weight, embedding_weight.
        past: Sizes of sources, or of updates where there are none, at earlier looks.
    """

    policy: Policy[Any]
    steps: int | None
    updates: list[float | None]
    reads: list[float | None] | None
    sizes: dict[str, float | None]
    weights: list[dict[str, float]] | None
    effective: dict[int, float] | None
    means: dict[str, float]
    past: list[list[float]]

    def choices(self) -> list[int]:
        """Sites, the readout among them, that mix at least two sources."""
        policy = self.policy
        if not isinstance(policy, RoutedPolicy):
            return []
        sites = range(policy.num_sites + 1)
        return [site for site in sites if len(policy.initial_weights(site)) > 1]

    def places(self, sites: Sequence[int]) -> str:
        """Sites for people: a few by name, then how many more."""
        named = [site_name(self.policy, site) for site in sites[:3]]
        more = len(sites) - len(named)
        return ", ".join(named) + (f" and {more} more" if more else "")


def look_at(
    seen: Observation | Capture, policy: Policy[Any], history: Iterable[Mapping[str, Any]]
) -> Look:
    """Bring what was seen into the form that checks take; errors as of `health`."""
    _require_seen_in(seen, policy)
    records = [record for record in history if record.get("kind", "routing") == "routing"]
    steps = [record["step"] for record in records if type(record.get("step")) is int]
    common: dict[str, Any] = {
        "policy": policy,
        "steps": max(steps, default=None),
        "past": [_sizes(record) for record in records],
    }
    coefficients = [_coefficient(policy, site) for site in range(policy.num_sites)]
    if not isinstance(seen, Capture):
        return Look(
            **common,
            updates=_times(seen["update_rms"], coefficients),
            reads=None,
            sizes=seen.get("source_rms", {}),
            weights=None,
            effective=None,
            means={k: v for k, v in seen.items() if isinstance(v, float)},
        )
    result = seen.result()
    sites = result["sites"]
    # those that are not finite say nothing
    weights: list[dict[str, float]] = [
        {} if None in site["weights"].values() else site["weights"] for site in sites
    ]
    found = [site for site in sites if site["entropy"] is not None]
    means = {
        key: statistics.fmean(site[key] for site in found)
        for key in ("entropy", "effective_sources")
        if found
    }
    return Look(
        **common,
        updates=_times([site["update_rms"] for site in sites[:-1]], coefficients),
        reads=[site["read_rms"] for site in sites],
        sizes=result["source_rms"],
        weights=weights,
        effective={site["site"]: site["effective_sources"] for site in found},
        means=means | shares([row for row in weights if row], policy.detail_names),
    )


def _require_seen_in(seen: Any, policy: Policy[Any]) -> None:
    """Refuse what is neither a capture nor an observation, or comes from another stack."""
    if isinstance(seen, Capture):
        num_sites = seen.policy.num_sites
    elif isinstance(seen, Mapping) and isinstance(seen.get("update_rms"), list):
        num_sites = len(seen["update_rms"])
    else:
        lack = " without `update_rms`" if isinstance(seen, Mapping) else ""
        raise UserError(
            "health takes what rr.capture gave, itself, or a line of kind `routing` of "
            f"metrics.jsonl; got a {type(seen).__name__}{lack}"
        )
    if num_sites != policy.num_sites:
        raise UserError(
            f"what was seen has {num_sites} sites and the model {policy.num_sites}; pass the model "
            "that was looked at"
        )


def shares(rows: Sequence[Mapping[str, float]], details: frozenset[str]) -> dict[str, float]:
    """Weights on details and on the embedding, mean over reads that mix."""
    if not rows:
        return {}
    on_details = [math.fsum(w for name, w in row.items() if name in details) for row in rows]
    return {
        "detail_weight": statistics.fmean(on_details),
        "embedding_weight": statistics.fmean(row.get("embedding", 0.0) for row in rows),
    }


def whole(parameter: Tensor) -> Tensor:
    """A parameter on the CPU in float32, gathered where it is sharded."""
    full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    found: Tensor = full.detach().float().cpu()
    return found


def _sizes(record: Mapping[str, Any]) -> list[float]:
    """Sizes in a line of metrics, which may be anyone's."""
    found = record.get("source_rms") or record.get("update_rms")
    sizes = list(found.values()) if isinstance(found, dict) else found
    if not isinstance(sizes, list):
        return []
    return [size for size in sizes if isinstance(size, float)]


def _coefficient(policy: Policy[Any], site: int) -> float | None:
    scale = policy.coefficient(site)
    return 1.0 if scale is None else number(scale.detach().abs().mean())


def _times(
    sizes: Sequence[float | None], coefficients: Sequence[float | None]
) -> list[float | None]:
    pairs = zip(sizes, coefficients, strict=True)
    return [None if size is None or c is None else size * c for size, c in pairs]
