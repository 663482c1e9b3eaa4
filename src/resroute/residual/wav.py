"""WAV v1 (arXiv 2606.06564v1): block sums and zero-sum details in one depth-wise softmax."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from resroute.config import UserError, register, require_whole, suggestion
from resroute.core import (
    SIGN_RULES,
    Source,
    accumulate,
    compute_dtype,
    inverse_rms,
    matching_factor,
    signs,
)
from resroute.ops import MATCHING, SiteForm
from resroute.residual.routed import RoutedPolicy, RoutedStream, Slot
from resroute.residual.routed_config import BlockedConfig

# within float32 and far beyond use
_LARGE = 1e6


@register("wav")
@dataclass(frozen=True, kw_only=True)
class WAV(BlockedConfig):
    """Block AttnRes whose blocks give, besides their sum, one detail source for each basis.

    WAV v1, arXiv 2606.06564v1, in the softmax of Attention Residuals (arXiv 2603.15031, eq. 2 to
    4). A block with updates `u_1 .. u_m` gives its state `C` and, for each basis with signs `c_i`,
    a detail `X`. The phase's signs are +1 at attention and -1 at MLP sites, the split's +1 in the
    block's first half and -1 after:

        C = sum_i u_i    X = sum_i c_i u_i    v = sg(min(rms(C) / rms(X), rho_max)) X
        logit = <q, g * X / rms(X)> + b       b = `detail_bias` at first

    `v` is the value of the detail and `sg` stops the gradient; states and the embedding are mixed
    as in `BlockAttnRes`. Stated by the paper: the two bases, zero-sum signs, a negative detail bias
    of -2, detached RMS matching with a maximum factor, a readout of sums alone. Our choices are
    fields and are listed in docs/methods.md.

    Parameters: those of `FullAttnRes`; `detail_bias` (K * L, number of bases), with one row more
    where details are in the readout; `basis` (K * L, number of bases) where learned.

    Raises:
        UserError: As `BlockedConfig`; bases that are unknown or not all different; or a
            `detail_bias` or `rho_max` out of its range.
    """

    bases: tuple[str, ...] = ("phase", "split")
    """Registered sign rules; `()` is Block AttnRes exactly."""
    basis_seed: int = 0
    """Seeds the control basis `random`."""
    learn_bases: bool = False
    """Learn the signs as coefficients, used less their mean over the block: still zero-sum."""
    detail_bias: float = -2.0
    """Initial logit bias of every detail source."""
    learn_detail_bias: bool = True
    """Whether the bias is trained, one for each site and basis."""
    bias_running: bool = True
    """Whether the running block's details carry the bias too."""
    matching: Literal["detached", "attached", "off"] = "detached"
    """RMS matching of a detail to its block's sum; "attached" lets gradients through the factor."""
    rho_max: float | None = 2.0
    """Largest matching factor; None is no limit."""
    details_in_readout: bool = False
    """Whether the readout mixes details, with a bias row of its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.bases, str) or not isinstance(self.bases, Iterable):
            raise UserError(
                f"bases must be a sequence of names, such as ('split',), got {self.bases!r}"
            )
        object.__setattr__(self, "bases", tuple(self.bases))
        require_whole("basis_seed", self.basis_seed, 0)
        for name in self.bases:
            if name not in SIGN_RULES:
                known = ", ".join(SIGN_RULES)
                raise UserError(
                    f"unknown basis {name!r}{suggestion(name, SIGN_RULES)}; known: {known}"
                )
        if len(set(self.bases)) < len(self.bases):
            raise UserError(f"bases must differ from each other, got {list(self.bases)}")
        if not abs(self.detail_bias) <= _LARGE:
            raise UserError(f"detail_bias must be within {_LARGE:g}, got {self.detail_bias}")
        if self.rho_max is not None and not 0 <= self.rho_max <= _LARGE:
            raise UserError(
                f"rho_max must be at least 0 and at most {_LARGE:g}, or None for no limit, got "
                f"{self.rho_max}"
            )

    @property
    def label(self) -> str:
        """WAV or HAARES, or WAV with its bases where they are neither's."""
        names = {("phase", "split"): "WAV", ("split",): "HAARES"}
        return names.get(self.bases, f"WAV ({' + '.join(self.bases) or 'no basis'})")

    def _build(self, num_layers: int, dim: int, kinds: tuple[str, ...]) -> "WAVPolicy":
        return WAVPolicy(self, num_layers, dim, kinds)


def HAARES(  # noqa: N802 - it stands beside the config classes
    *,
    eps: float = WAV.eps,
    key_gain: bool = WAV.key_gain,
    gated: bool = WAV.gated,
    num_blocks: int | None = WAV.num_blocks,
    block_layers: int | None = WAV.block_layers,
    learn_bases: bool = WAV.learn_bases,
    detail_bias: float = WAV.detail_bias,
    learn_detail_bias: bool = WAV.learn_detail_bias,
    bias_running: bool = WAV.bias_running,
    matching: Literal["detached", "attached", "off"] = WAV.matching,
    rho_max: float | None = WAV.rho_max,
    details_in_readout: bool = WAV.details_in_readout,
) -> WAV:
    """WAV with the split basis alone, the author's later form (arXiv 2606.06564v2).

    That the other settings are WAV's is our reading; they, and errors, are as of `WAV`.
    """
    return WAV(
        bases=("split",),
        eps=eps,
        key_gain=key_gain,
        gated=gated,
        num_blocks=num_blocks,
        block_layers=block_layers,
        learn_bases=learn_bases,
        detail_bias=detail_bias,
        learn_detail_bias=learn_detail_bias,
        bias_running=bias_running,
        matching=matching,
        rho_max=rho_max,
        details_in_readout=details_in_readout,
    )


class WAVPolicy(RoutedPolicy):
    """Carries out `WAV`."""

    def __init__(self, config: WAV, num_layers: int, dim: int, kinds: tuple[str, ...]) -> None:
        blocks = config.blocks(num_layers, len(kinds))
        signs = _site_signs(config, blocks, kinds * num_layers)
        super().__init__(
            config,
            blocks,
            num_layers,
            dim,
            kinds,
            bases=config.bases,
            details_in_readout=config.details_in_readout,
            signs=None if config.learn_bases else signs,
            form=SiteForm(
                eps=config.eps,
                matching=MATCHING[config.matching],
                rho_max=math.inf if config.rho_max is None else config.rho_max,
            ),
        )
        self.config = config
        self.signs = signs
        self.bias_running = config.bias_running
        self._check_bases(config)
        self._block_of = [block for block in blocks for _ in block]
        rows = self.num_sites + int(config.details_in_readout)
        self.detail_bias: nn.Parameter | Tensor | None = None
        self.basis: nn.Parameter | None = None
        if config.bases:
            bias = torch.empty(rows, len(config.bases))
            if config.learn_detail_bias:
                self.detail_bias = nn.Parameter(bias)
            else:
                del self.detail_bias
                self.register_buffer("detail_bias", bias)
            if config.learn_bases:
                self.basis = nn.Parameter(torch.empty(self.num_sites, len(config.bases)))

    def _check_bases(self, config: WAV) -> None:
        sums = [name for name in config.bases if name.startswith("duplicate")]
        if config.learn_bases and sums:
            raise UserError(
                "learn_bases takes coefficients less their mean over the block, which leaves "
                f"nothing of the basis {sums[0]!r}; leave one of them out"
            )
        # all blocks are as long as the first, but for the last, whose details no later block reads
        rows = [self.signs[site] for site in self.blocks[0]] if config.bases else []
        size = len(rows)
        directions: dict[str, tuple[float, ...]] = {}
        for name, column in zip(config.bases, zip(*rows, strict=True), strict=True):
            if not any(column):
                self.notes.append(
                    f"in a block of {size} the basis {name!r} is zero: "
                    "its details are sources of zeros that take weight; use fewer, longer blocks"
                )
                return
            for other, known in directions.items():
                # a negative is another direction: weights are positive; duplicates are meant to be
                # equal
                if known == column and name not in sums:
                    layers = size // len(self.kinds)
                    told = "one layer" if layers == 1 else f"{layers} layers"
                    self.notes.append(
                        f"with {told} a block the {other} and {name} bases coincide; use fewer, "
                        "longer blocks or one basis"
                    )
                    return
            directions[name] = column

    def reset_parameters(self) -> None:
        """Zero queries, unit gains, biases at `detail_bias`, coefficients at the signs."""
        super().reset_parameters()
        if self.detail_bias is not None:
            nn.init.constant_(self.detail_bias, self.config.detail_bias)
        if self.basis is not None:
            with torch.no_grad():
                self.basis.copy_(torch.tensor(self.signs))

    def _accumulate(
        self, stream: RoutedStream, update: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        sums: Sequence[Tensor | None] = stream.running.streams or [None] * (1 + len(self.bases))
        coefficients = (1.0, *self.coefficients(stream.site))
        return tuple(
            accumulate(total, update, coefficient, dtype=dtype)
            for total, coefficient in zip(sums, coefficients, strict=True)
        )

    def coefficients(self, site: int) -> Sequence[float | Tensor]:
        """Signs of a site, or its learned coefficients, by basis."""
        if self.basis is None:
            return self.signs[site] if self.bases else ()
        block = self._block_of[site]
        basis = self.basis.to(compute_dtype(self.basis.dtype))
        return (basis[site] - basis[block.start : block.stop].mean(0)).unbind(0)

    def _block_sources(self, running: tuple[Tensor, ...]) -> tuple[Source, ...]:
        state = self._source(running[0])
        details = []
        for detail in running[1:]:
            detail_inverse_rms = inverse_rms(detail, self.eps)
            scale = None
            if self.config.matching != "off":
                scale = matching_factor(state.inverse_rms, detail_inverse_rms, self.config.rho_max)
                scale = scale.detach() if self.config.matching == "detached" else scale
            details.append(Source(detail, detail_inverse_rms, scale))
        return (state, *details)

    def _initial_bias(self, slot: Slot) -> float:
        return self.config.detail_bias if self._is_biased(slot) else 0.0

    def _is_biased(self, slot: Slot) -> bool:
        return slot.basis is not None and (self.bias_running or not slot.running)

    def _bias(self, site: int, slot: Slot) -> Tensor | None:
        if slot.basis is None or not self._is_biased(slot):
            return None
        assert self.detail_bias is not None
        return self.detail_bias[site, slot.basis]

    def _detail_biases(self, dtype: torch.dtype) -> Tensor | None:
        return None if self.detail_bias is None else self.detail_bias.to(dtype)


def _site_signs(config: WAV, blocks: list[range], kinds: Sequence[str]) -> list[list[float]]:
    """Signs by site and basis."""
    columns = []
    for name in config.bases:
        column: list[float] = []
        for index, block in enumerate(blocks):
            # each block of each seed draws its own random signs
            seed = config.basis_seed * 100_003 + index
            column += signs(name, kinds[block.start : block.stop], seed)
        columns.append(column)
    return [list(row) for row in zip(*columns, strict=True)]
