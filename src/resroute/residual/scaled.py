"""Methods that keep one running sum: PreNorm, ReZero and LayerScale."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from resroute.config import UserError, register, settle
from resroute.core import accumulate
from resroute.ops import SiteForm, choose, operators
from resroute.ops import site as site_operation
from resroute.ops.exact import addable, read_dtype
from resroute.residual.base import STREAM, Policy, ResidualConfig
from resroute.residual.norms import Norm, fold, normalise

_SUM = SiteForm(target=0)


class SumStream(NamedTuple):
    """The next site and the running sum (..., D)."""

    site: int
    total: Tensor
    backend: str
    pending: Tensor | None = None
    """An update that is added as the next site is read."""


class SumPolicy(Policy[SumStream]):
    """`h <- h + c_s u` with a coefficient a site; reads and readout are `h`."""

    def _reference(self, stream: SumStream) -> Tensor:
        return stream.total

    def _start(self, embedding: Tensor) -> SumStream:
        choice = choose(embedding.device, embedding.dtype, self.dim, num_bases=0)
        return SumStream(0, embedding, choice.backend)

    def _read(self, stream: SumStream) -> Tensor:
        if stream.pending is None:
            return stream.total
        return accumulate(stream.total, stream.pending, dtype=stream.total.dtype)

    def _read_normalised(self, stream: SumStream, norm: Norm) -> tuple[Tensor, SumStream]:
        folded = fold(stream.backend, norm, stream.total)
        if folded is None or stream.pending is None:
            total = self._read(stream)
            stream = stream._replace(total=total, pending=None)
            return normalise(stream.backend, total, norm), stream
        normalised, (total,) = site_operation(
            operators(stream.backend),
            _SUM,
            stream.pending,
            [stream.total],
            gain=folded.gain,
            norm_eps=folded.eps,
            read_dtype=read_dtype(stream.total.device.type, stream.total.dtype),
        )
        return normalised, stream._replace(total=total, pending=None)

    def _write(self, stream: SumStream, update: Tensor) -> SumStream:
        total, coefficient = self._read(stream), self.coefficient(stream.site)
        next_site = stream.site + 1
        if coefficient is None and stream.backend != "reference":
            pending = addable(update, total.dtype)
            return stream._replace(site=next_site, total=total, pending=pending)
        total = accumulate(
            total, update, 1.0 if coefficient is None else coefficient, dtype=total.dtype
        )
        return stream._replace(site=next_site, total=total, pending=None)

    def _weights(self, stream: SumStream) -> tuple[list[str], Tensor]:
        return [STREAM], stream.total.new_ones((*stream.total.shape[:-1], 1))


@register("pre_norm")
@dataclass(frozen=True, kw_only=True)
class PreNorm(ResidualConfig):
    """The plain residual stream, `h <- h + u`; it has no parameters."""

    def _build(self, num_layers: int, dim: int, kinds: tuple[str, ...]) -> "SumPolicy":
        return SumPolicy(num_layers, dim, kinds)


@register("re_zero")
@dataclass(frozen=True, kw_only=True)
class ReZero(ResidualConfig):
    """`h <- h + alpha_l u`, one scalar a layer, shared by its sublayers (arXiv 2003.04887).

    Scalars start at zero, so the stack starts as the identity. Parameter: `alpha` (L,).
    """

    def _build(self, num_layers: int, dim: int, kinds: tuple[str, ...]) -> "ReZeroPolicy":
        return ReZeroPolicy(num_layers, dim, kinds)


class ReZeroPolicy(SumPolicy):
    """Carries out `ReZero`."""

    def __init__(self, num_layers: int, dim: int, kinds: tuple[str, ...]) -> None:
        super().__init__(num_layers, dim, kinds)
        self.alpha = nn.Parameter(torch.empty(num_layers))

    def reset_parameters(self) -> None:
        """Close every layer."""
        nn.init.zeros_(self.alpha)

    def coefficient(self, site: int) -> Tensor:
        """The scalar of the site's layer."""
        return self.alpha[site // len(self.kinds)]


@register("layer_scale")
@dataclass(frozen=True, kw_only=True)
class LayerScale(ResidualConfig):
    """`h <- h + scale_s * u`, one gain a channel and site (CaiT, arXiv 2103.17239, eq. 4).

    Parameter: `scale` (K * L, D).

    Raises:
        UserError: An `init` that is no number, or beyond 1e6.
    """

    init: float | None = 1e-4
    """Initial gain. None takes CaiT's depth rule: 0.1 up to 18 layers, 1e-5 up to 24, else 1e-6.
    One starts as PreNorm."""

    def __post_init__(self) -> None:
        settle(self)
        if self.init is not None and not abs(self.init) <= 1e6:
            raise UserError(
                f"LayerScale needs an init within 1e6, got {self.init}; the default is 1e-4"
            )

    def _build(self, num_layers: int, dim: int, kinds: tuple[str, ...]) -> "LayerScalePolicy":
        return LayerScalePolicy(self, num_layers, dim, kinds)


class LayerScalePolicy(SumPolicy):
    """Carries out `LayerScale`."""

    def __init__(
        self, config: LayerScale, num_layers: int, dim: int, kinds: tuple[str, ...]
    ) -> None:
        super().__init__(num_layers, dim, kinds)
        by_depth = 0.1 if num_layers <= 18 else 1e-5 if num_layers <= 24 else 1e-6
        self.init = by_depth if config.init is None else config.init
        self.scale = nn.Parameter(torch.empty(self.num_sites, dim))

    def reset_parameters(self) -> None:
        """Set every gain to the initial one."""
        nn.init.constant_(self.scale, self.init)

    def coefficient(self, site: int) -> Tensor:
        """The gains (D,) of the site."""
        return self.scale[site]
