"""The static form of a site: how its sources are made of the running streams."""

import math
from dataclasses import dataclass, field

MATCHING = {"off": 0, "detached": 1, "attached": 2}


@dataclass(frozen=True, kw_only=True)
class SiteForm:
    """What is known of a site before any tensor is: K bases of Z running streams.

    WAV's state, phase and split are three linear combinations of sums of updates. Keeping the sums
    (attention's X, the MLPs' Y, the first half's S = X + Y) instead of the bases lets an update
    touch one tensor: C = X + Y, P = X - Y, and Q = C, from the second half on Q = 2 S - C.
    """

    coefficients: tuple[tuple[float, ...], ...] = ()
    """K rows of Z numbers; row 0 is the state. Empty: the read is the prior, or else stream 0."""
    target: int = -1
    """Stream that the update is added to; -1 where there is no update."""
    eps: float = 1e-6
    """Of the bases' root mean squares."""
    matching: int = 0
    """RMS matching of the details, a value of `MATCHING`."""
    rho_max: float = math.inf
    """Largest matching factor."""
    flat: tuple[float, ...] = field(init=False, repr=False)
    """The coefficients row by row."""

    def __post_init__(self) -> None:
        flat = tuple(number for row in self.coefficients for number in row)
        object.__setattr__(self, "flat", flat)
