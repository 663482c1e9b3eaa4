"""Attention Residuals: Full and Block (arXiv 2603.15031), and Delta (arXiv 2605.18855)."""

from dataclasses import dataclass

from resroute.config import register, require_whole
from resroute.core import block_sites
from resroute.residual.routed import RoutedPolicy
from resroute.residual.routed_config import BlockedConfig, RoutedConfig, blocks_by_number


@register("full_attn_res")
@dataclass(frozen=True, kw_only=True)
class FullAttnRes(RoutedConfig):
    """Each site mixes the embedding and every earlier update; the readout mixes them all.

    Attention Residuals, arXiv 2603.15031, eq. 2 to 4. A site with query `q` and key gain `g` reads
    `sum_i p_i v_i` of its sources `v_i`, with `p = softmax_i <q, g * v_i / rms(v_i)>`.

    Parameters: `query` and `key_gain` (K * L + 1, D), `gate` (K * L + 1,) where gated.

    Raises:
        UserError: As `RoutedConfig`.
    """

    def _build(self, num_layers: int, dim: int, kinds: tuple[str, ...]) -> RoutedPolicy:
        # one site a block: every update is finished as soon as it is written
        blocks = block_sites(num_layers * len(kinds), 1, 1)
        return RoutedPolicy(self, blocks, num_layers, dim, kinds, sum_name="update")


@register("block_attn_res")
@dataclass(frozen=True, kw_only=True)
class BlockAttnRes(BlockedConfig):
    """Each site mixes the embedding, finished blocks' sums and the running block's sum so far.

    Attention Residuals, arXiv 2603.15031, section on Block AttnRes, eq. 5 and 6: a block's first
    site sees no running sum; the readout mixes the embedding and all block sums. The mix and the
    parameters are those of `FullAttnRes`.

    Raises:
        UserError: As `BlockedConfig`.
    """

    def _build(self, num_layers: int, dim: int, kinds: tuple[str, ...]) -> RoutedPolicy:
        blocks = self.blocks(num_layers, len(kinds))
        return RoutedPolicy(self, blocks, num_layers, dim, kinds)


@register("delta_attn_res")
@dataclass(frozen=True, kw_only=True)
class DeltaAttnRes(RoutedConfig):
    """The plain sum stays; a read adds to it a mix of earlier updates, or of block sums.

    Delta Attention Residuals, arXiv 2605.18855: `h_s = e + sum_{j<s} u_j + sum_i p_i v_i`, with the
    mix of `FullAttnRes`. The read of site 0 and the readout are the plain sum. In its block form
    the authors' code takes other sources than the formula from the third block on.

    Parameters: `query` and `key_gain` (K * L, D), `gate` (K * L,) where gated.

    Raises:
        UserError: As `RoutedConfig`, or a `num_blocks` below one.
    """

    num_blocks: int | None = None
    """Mix the sums of this many blocks; None mixes every earlier update."""
    embedding_source: bool = True
    """Whether the embedding is among the sources."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_blocks is not None:
            require_whole("num_blocks", self.num_blocks, 1)

    def _build(self, num_layers: int, dim: int, kinds: tuple[str, ...]) -> RoutedPolicy:
        if self.num_blocks is None:
            blocks = block_sites(num_layers * len(kinds), 1, 1)
        else:
            blocks = blocks_by_number(self.num_blocks, num_layers, len(kinds))
        return RoutedPolicy(
            self,
            blocks,
            num_layers,
            dim,
            kinds,
            sum_name="update" if self.num_blocks is None else "state",
            embedding_source=self.embedding_source,
            additive=True,
        )
