"""Options that routed methods share, and how layers gather into blocks."""

import math
from dataclasses import dataclass

from resroute.config import UserError, documented, require_whole, settle
from resroute.core import block_sites
from resroute.residual.base import ResidualConfig


@documented
@dataclass(frozen=True, kw_only=True)
class RoutedConfig(ResidualConfig):
    """Options of every method with a depth-wise softmax.

    Raises:
        UserError: An option of another kind than its field, or an `eps` outside 0 to 1.
    """

    eps: float = 1e-6
    """Added to mean squares. Our choice: the papers give none. Zero is for tests: a source of
    zeros then gives NaN."""
    key_gain: bool = True
    """Learn an RMSNorm gain on the keys, as Kimi K3 does; False leaves it out."""
    gated: bool = False
    """Blend from the plain sum by a gate that starts at zero: step 0 is PreNorm exactly."""

    def __post_init__(self) -> None:
        settle(self)
        if not 0 <= self.eps <= 1:
            raise UserError(f"eps must be at least 0 and at most 1, got {self.eps}")


@documented
@dataclass(frozen=True, kw_only=True)
class BlockedConfig(RoutedConfig):
    """Options of methods that gather layers into blocks; the unit is layers, not sublayers.

    Raises:
        UserError: As `RoutedConfig`; or `num_blocks` and `block_layers` together, or below one.
    """

    num_blocks: int | None = None
    """Blocks of the stack; each takes `ceil(L / num_blocks)` layers, the last may be shorter.
    With neither option `min(4, L)` is taken; the policy's `num_blocks` is what that makes."""
    block_layers: int | None = None
    """Layers a block, instead of `num_blocks`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_blocks is not None and self.block_layers is not None:
            raise UserError(
                f"give num_blocks or block_layers, not both (got {self.num_blocks} and "
                f"{self.block_layers})"
            )
        for name in ("num_blocks", "block_layers"):
            value = getattr(self, name)
            if value is not None:
                require_whole(name, value, 1)

    def blocks(self, num_layers: int, sites_per_layer: int) -> list[range]:
        """Sites of each block of a stack."""
        layers = self.block_layers
        if layers is None:
            asked = min(4, num_layers) if self.num_blocks is None else self.num_blocks
            return blocks_by_number(asked, num_layers, sites_per_layer)
        if layers > num_layers:
            raise UserError(
                f"block_layers={layers} is more than the stack's {num_layers} layers; "
                f"use at most {num_layers}"
            )
        return block_sites(num_layers, sites_per_layer, layers)


def blocks_by_number(num_blocks: int, num_layers: int, sites_per_layer: int) -> list[range]:
    """Sites of each block where a number of blocks is asked for; there may be fewer."""
    if num_blocks > num_layers:
        raise UserError(
            f"num_blocks={num_blocks} is more than the stack's {num_layers} layers; "
            f"use at most {num_layers}"
        )
    return block_sites(num_layers, sites_per_layer, math.ceil(num_layers / num_blocks))
