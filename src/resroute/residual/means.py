"""Sums that a capture has taken, as the means that people read."""

from typing import Any

from torch import Tensor

from resroute.config import UserError
from resroute.residual.base import STREAM, Policy, by_kind, kind_of_source, site_name
from resroute.residual.tally import Tally, number

SOURCES = -1
"""Where sizes of finished sources are tallied, which are of no site."""


class Means:
    """Means of a tally by site and source; names of classes are those of `capture`."""

    def __init__(self, policy: Policy[Any], tally: Tally, class_names: list[str]) -> None:
        self.policy = policy
        self.tally = tally
        self.class_names = class_names

    def result(self) -> dict[str, Any]:
        """What `Capture.result` describes, without its counts."""
        policy, tally = self.policy, self.tally
        blocks: list[range] = getattr(policy, "blocks", [])
        return {
            "num_layers": policy.num_layers,
            "layer_kinds": list(policy.kinds),
            "blocks": [[block.start, block.stop] for block in blocks],
            "details": [name for name in policy.source_names() if name in policy.detail_names],
            "sites": [self.site(site) for site in range(policy.num_sites + 1)],
            "source_rms": {
                name: number(tally.mean(SOURCES, name)) for name in tally.names(SOURCES)
            },
        }

    def table(self, token_class: str | None) -> dict[str, Any] | None:
        """What `Capture.table` describes."""
        policy = self.policy
        sites = range(policy.num_sites + 1)
        every = {site: self._weights(site) for site in sites}
        sources = list(dict.fromkeys(name for row in every.values() for name in row))
        if not sources:
            return None
        if token_class is not None:
            # not every site mixes: of Delta the readout does not
            known = next((found for site in sites if (found := self._classes(site))), {})
            if token_class not in known:
                raise UserError(f"no class {token_class!r}; there are {', '.join(known) or 'none'}")
            of_class = {site: self._classes(site).get(token_class, {}) for site in sites}
            every = {site: found.get("weights", {}) for site, found in of_class.items()}
        # running sources last: they exist at every block, finished ones from theirs on
        sources.sort(key=lambda name: name.startswith("running"))
        return {
            "sites": [site_name(policy, site) for site in sites],
            "sources": sources,
            "weights": [[every[site].get(name) for name in sources] for site in sites],
        }

    def site(self, site: int) -> dict[str, Any]:
        """One entry of `sites`."""
        policy, tally = self.policy, self.tally
        is_readout = site == policy.num_sites
        layer, place = divmod(site, len(policy.kinds))
        scale = None if is_readout else policy.coefficient(site)
        weights = self._weights(site)
        known = {name: weight for name, weight in weights.items() if weight is not None}
        kinds: dict[str, float | None] = {**by_kind(known)}
        if len(known) < len(weights):
            kinds = {kind_of_source(name): None for name in weights}
        return {
            "site": site,
            "name": site_name(policy, site),
            "layer": None if is_readout else layer,
            "kind": None if is_readout else policy.kinds[place],
            "weights": weights,
            "kinds": kinds,
            "entropy": number(tally.mean(site, "entropy")),
            "effective_sources": number(tally.mean(site, "effective")),
            "read_rms": number(tally.root(site, "read")),
            "update_rms": number(tally.root(site, "update")),
            "cosine": self._cosine(site),
            "update_gradient": number(tally.root(site, "update_gradient")),
            "read_gradient": number(tally.root(site, "read_gradient")),
            "gate": number(policy.gate_of(site)),
            "coefficient": None if scale is None else number(scale.detach().abs().mean()),
            "classes": self._classes(site),
        }

    def _weights(self, site: int) -> dict[str, float | None]:
        mean = self.tally.mean(site, "weights")
        return {} if mean is None else self._named(site, mean)

    def _named(self, site: int, values: Tensor) -> dict[str, float | None]:
        names = self.policy.source_names(site)
        return {name: number(value) for name, value in zip(names, values, strict=True)}

    def _cosine(self, site: int) -> dict[str, float | None]:
        mean = self.tally.mean(site, "cosine")
        if mean is None:
            return {}
        names = self.policy.source_names(site)
        # last, where the method keeps a plain sum besides its sources
        names = names if len(names) == len(mean) else (*names, STREAM)
        return {name: number(value) for name, value in zip(names, mean, strict=True)}

    def _classes(self, site: int) -> dict[str, dict[str, Any]]:
        counts = self.tally.sums.get((site, "class_tokens"))
        if counts is None:
            return {}
        names = [*self.class_names, *map(str, range(len(self.class_names), len(counts)))]
        rows = self.tally.sums[site, "class_weights"].cpu()
        return {
            name: {
                "tokens": int(count),
                "weights": self._named(site, row / count) if count else {},
            }
            for name, row, count in zip(names, rows, counts.cpu(), strict=True)
        }
