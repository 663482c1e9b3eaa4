"""The static form of a site: how its sources are made of the running streams."""

import math
from dataclasses import dataclass, field

from resroute.config import UserError

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


def require_target(target: int, streams: int, has_update: bool) -> None:
    """Refuse a target that is no stream, and one without an update or the other way round.

    Args:
        target: Of a site's form.
        streams: Their number, Z.
        has_update: Whether the site is given an update.

    Raises:
        UserError: The target is not in -1 .. Z - 1, or does not go with the update.
    """
    if not -1 <= target < streams:
        raise UserError(
            f"target {target} is no stream: with {streams} of them it is -1 (no update) to "
            f"{streams - 1}"
        )
    if (target >= 0) != has_update:
        raise UserError(
            f"a site of target {target} {'has no' if has_update else 'needs an'} update"
        )
