"""Colours, dashes and marks of a study's series, told apart with any colour vision."""

from dataclasses import dataclass

from resroute.analysis import METHODS
from resroute.analysis.figures import DASHES, MARKERS, PALETTE
from resroute.config import variants
from resroute.experiments.study import Study
from resroute.residual import ResidualConfig

_LABELS = {name: method().label for name, method in variants(ResidualConfig).items()}


@dataclass(frozen=True, kw_only=True)
class Look:
    """Positions in `PALETTE`, `DASHES` and `MARKERS`: no two series share colour and dash."""

    colour: int
    dash: int
    marker: int


def looks(study: Study) -> dict[str, Look]:
    """A look for every series: that of its method for one of them, and what is left for others."""
    methods = {group.series: group.method for group in study.groups}
    first: dict[str, str] = {}
    for series, method in methods.items():
        # a method as it is by default has the method's own colour
        if series == first.setdefault(method, series) or series == _LABELS.get(method):
            first[method] = series
    found: dict[str, Look] = {}
    for method, series in first.items():
        known = method in METHODS
        place = METHODS.index(method) % len(MARKERS) if known else 0
        colour = place if known else len(PALETTE) - 1
        found[series] = Look(colour=colour, dash=0, marker=place)
    taken = {(look.colour, look.dash) for look in found.values()}
    # the last colour, grey, is for methods that are not registered
    pairs = [(c, d) for d in range(len(DASHES)) for c in range(len(PALETTE) - 1)]
    free = [pair for pair in pairs if pair not in taken] or pairs
    rest = [series for series in methods if series not in found]
    for i, series in enumerate(rest):
        colour, dash = free[i % len(free)]
        # not the mark of the method whose colour it shares
        found[series] = Look(colour=colour, dash=dash, marker=(i + colour + 1) % len(MARKERS))
    return found
