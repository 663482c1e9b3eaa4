"""Nothing wrong is timed: results are compared with the reference backend's first."""

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from resroute.bench.settings import Settings
from resroute.bench.workload import GPTStep
from resroute.residual import ResidualConfig

TOLERANCE = 2e-4
"""Largest deviation in float32. Another order of sums gives 1e-6 to 1e-5 at 24 layers; a wrong term
gives 1e-2 and more."""
ROUNDING = 3.0
"""In bfloat16: how many times the reference's own deviation from float32 is rounding."""
ROUNDING_FLOOR = 0.05

# gradients below this share of all are compared with that share instead of with themselves
_SMALL = 1e-3


class WrongResultError(RuntimeError):
    """A result that differs from the reference's by more than rounding; it is not timed."""


def deviations(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Norm of the difference over the norm, tensor by tensor.

    Very small tensors, which hold rounding errors alone, count against a thousandth of the norm of
    all gradients instead of their own.

    Raises:
        WrongResultError: They do not have the same names.
    """
    if found.keys() != expected.keys():
        names = sorted(found.keys() ^ expected.keys())
        raise WrongResultError(f"only one side has {', '.join(names)}")
    norms = {name: float(tensor.double().norm()) for name, tensor in expected.items()}
    whole = sum(norm**2 for name, norm in norms.items() if name != "loss") ** 0.5
    result = {}
    for name, tensor in expected.items():
        difference = float((found[name].double() - tensor.double()).norm())
        least = 0.0 if name == "loss" else _SMALL * whole
        # two zeros agree
        result[name] = difference / (max(norms[name], least) or 1.0)
    return result


def require_close(
    what: str,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    *,
    tolerance: float = TOLERANCE,
    rounding: Mapping[str, float] | None = None,
) -> float:
    """Compare results with the reference's.

    Args:
        what: Named in the error.
        found: Results by name.
        expected: The reference's.
        tolerance: Largest relative deviation.
        rounding: More that is allowed, by name.

    Returns:
        The largest deviation.

    Raises:
        WrongResultError: One deviates by more, or is not finite.
    """
    measured = deviations(found, expected)
    for name, deviation in measured.items():
        allowed = tolerance + (rounding or {}).get(name, 0.0)
        # nan is in no order
        if not deviation <= allowed:
            raise WrongResultError(
                f"{what}: {name} differs from the reference by {deviation:.2g} of its norm, "
                f"rounding explains {allowed:.2g}; it is not timed"
            )
    return max(measured.values())


class Truth:
    """What the reference backend computes of one method, each at most once."""

    def __init__(self, settings: Settings, residual: ResidualConfig) -> None:
        self.settings = settings
        self.residual = residual

    def require_formula(self, backend: str) -> float:
        """Compare a backend in float32, uncompiled, at the very depth, width and context, one row.

        Returns:
            The largest relative deviation of the loss and all gradients.
        """
        found = self._step(backend, torch.float32, batch=1).outcome()
        return require_close(f"{self.residual.label} on {backend}", found, self._formula)

    def require_step(self, step: GPTStep) -> float:
        """Compare the very step that is timed, compiled and in its precision; see `ROUNDING`."""
        what = f"{self.residual.label} on {step.backend}"
        what += " (compiled)" if step.is_compiled else ""
        rounding, tolerance = None, TOLERANCE
        if step.precision != torch.float32:
            rounding = {name: ROUNDING * value for name, value in self._rounding.items()}
            tolerance = ROUNDING_FLOOR
        return require_close(
            what, step.outcome(), self._exact, tolerance=tolerance, rounding=rounding
        )

    @cached_property
    def _formula(self) -> dict[str, Tensor]:
        return self._step("reference", torch.float32, batch=1).outcome()

    @cached_property
    def _exact(self) -> dict[str, Tensor]:
        return self._step("reference", torch.float32).outcome()

    @cached_property
    def _rounding(self) -> dict[str, float]:
        rounded = self._step("reference", torch.bfloat16).outcome()
        return deviations(rounded, self._exact)

    def _step(self, backend: str, precision: torch.dtype, batch: int | None = None) -> GPTStep:
        return GPTStep(
            self.settings, self.residual, backend, compiled=False, precision=precision, batch=batch
        )
