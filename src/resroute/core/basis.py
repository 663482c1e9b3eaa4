"""Blocks of layers and the sign rules that turn a block's updates into detail bases."""

import random
from collections.abc import Callable, Sequence

from resroute.config import UserError, suggestion

SignRule = Callable[[Sequence[str], int], list[float]]

# short blocks have nothing but what is avoided
_MOST_DRAWS = 100

SIGN_RULES: dict[str, SignRule] = {}
"""Detail bases by name: from the kinds of a block's sites and a seed to one sign a site."""


def sign_rule(name: str) -> Callable[[SignRule], SignRule]:
    """Enter a sign rule into the registry of detail bases."""

    def enter(rule: SignRule) -> SignRule:
        assert name not in SIGN_RULES, f"{name!r} is registered twice"
        SIGN_RULES[name] = rule
        return rule

    return enter


def signs(name: str, kinds: Sequence[str], seed: int = 0) -> list[float]:
    """Signs of one basis over a block's sites.

    Args:
        name: A registered basis.
        kinds: What each site of the block is, such as `("attention", "mlp", ..)`.
        seed: Used by random bases alone; give each block its own.

    Raises:
        UserError: An unknown basis, or one whose rule does not fit the block.
    """
    if name not in SIGN_RULES:
        known = ", ".join(SIGN_RULES)
        raise UserError(f"unknown basis {name!r}{suggestion(name, SIGN_RULES)}; known: {known}")
    return SIGN_RULES[name](kinds, seed)


@sign_rule("phase")
def phase(kinds: Sequence[str], seed: int) -> list[float]:
    """Attention minus MLP updates, `P_b` of WAV v1; sites of any other kind are left out."""
    values = [{"attention": 1.0, "mlp": -1.0}.get(kind, 0.0) for kind in kinds]
    if sum(values) != 0.0 or not any(values):
        raise UserError(
            "the phase basis needs as many attention as mlp sublayers in a block, got "
            f"{list(kinds)}; name them 'attention' and 'mlp', or leave 'phase' out of bases"
        )
    return values


@sign_rule("split")
def split(kinds: Sequence[str], seed: int) -> list[float]:
    """First half minus second half, `Q_b` of WAV v1; an odd block's middle site is left out."""
    half = len(kinds) // 2
    return [1.0] * half + [0.0] * (len(kinds) % 2) + [-1.0] * half


@sign_rule("duplicate")
def duplicate(kinds: Sequence[str], seed: int) -> list[float]:
    """The block's sum once more: a control for more sources without new directions."""
    return [1.0] * len(kinds)


@sign_rule("duplicate_2")
def duplicate_again(kinds: Sequence[str], seed: int) -> list[float]:
    """As `duplicate`: two controls have as many sources as two details."""
    return duplicate(kinds, seed)


@sign_rule("random")
def random_signs(kinds: Sequence[str], seed: int) -> list[float]:
    """Zero-sum signs in a seeded random order: a control for directions without meaning.

    Neither phase nor split, nor their negatives, where the block has other directions: a block of
    two layers has one, a block of three eight.
    """
    return _shuffled(kinds, random.Random(seed), _meant(kinds))


@sign_rule("random_2")
def random_signs_again(kinds: Sequence[str], seed: int) -> list[float]:
    """Another one than `random`: two controls have as many sources as two details."""
    avoided = [*_meant(kinds), random_signs(kinds, seed)]
    return _shuffled(kinds, random.Random(f"again, {seed}"), avoided)


def _meant(kinds: Sequence[str]) -> list[list[float]]:
    """The details of WAV that a block has."""
    found = [split(kinds, 0)]
    if kinds.count("attention") == kinds.count("mlp") > 0:
        found.append(phase(kinds, 0))
    return found


def _shuffled(
    kinds: Sequence[str], draw: random.Random, avoided: Sequence[list[float]]
) -> list[float]:
    """Signs in a random order; another one where they are avoided, up to sign, if there is any."""
    values = split(kinds, 0)
    for _ in range(_MOST_DRAWS):
        draw.shuffle(values)
        if values not in avoided and [-value for value in values] not in avoided:
            break
    return values


def block_sites(num_layers: int, sites_per_layer: int, block_layers: int) -> list[range]:
    """Sites of each block, in depth order; the last block may be shorter."""
    return [
        range(first * sites_per_layer, min(first + block_layers, num_layers) * sites_per_layer)
        for first in range(0, num_layers, block_layers)
    ]
