r"""How much of each block's updates its bases explain, and whether a third would be worth having.

A block's m updates are, of each token, m vectors $u_1, .., u_m$ of the width: its trajectory. A
source with coefficients $b$ holds $\sum_i b_i u_i$, so that sources with coefficients $B$ (m, k)
know of the trajectory what lies in the span of $B$. Over all tokens that is a share of

$$ \mathrm{tr}(P\,G) / \mathrm{tr}(G), \qquad G_{ij} = \sum_{tokens} \langle u_i, u_j \rangle, $$

with $P$ the orthogonal projection on the span. The Gram matrix G (m, m) is all that is kept.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from resroute.config import UserError, require_whole
from resroute.core import block_sites, signs
from resroute.residual.base import Policy, policy_of
from resroute.residual.diagnostics import listening_to
from resroute.residual.energy import best_addition, best_signs, captured, curve, spectrum, walsh
from resroute.residual.routed import RoutedPolicy
from resroute.residual.tally import Tally, total, wide
from resroute.residual.wav import WAVPolicy

FORMAT_VERSION = 1


@contextmanager
def trajectory(model: nn.Module, *, num_blocks: int = 4) -> Iterator["Trajectory"]:
    """Collect the Gram matrices of blocks' updates while the context is open.

    The model computes what it would compute. A pass keeps the updates of the block that runs; over
    passes only the matrices are kept, in float64.

    Args:
        model: A policy, or a module that holds one.
        num_blocks: Into how many blocks the layers are gathered where the method has none of at
            least two sites.

    Raises:
        UserError: Not exactly one policy, or a `num_blocks` below one.
    """
    policy = policy_of(model)
    require_whole("num_blocks", num_blocks, 1)
    found = Trajectory(policy, blocks_of(policy, num_blocks))
    with listening_to(policy, found.note_read, found.note_write, on_start=found.note_start):
        yield found


class Trajectory:
    """What `trajectory` collects; read it at any time.

    Attributes:
        policy: The policy that is looked at.
        blocks: Sites of each block.
    """

    def __init__(self, policy: Policy[Any], blocks: list[range]) -> None:
        self.policy = policy
        self.blocks = blocks
        self._tally = Tally()
        self._block_of = {site: number for number, block in enumerate(blocks) for site in block}
        self._updates: list[Tensor] = []
        self._next = 0

    def note_start(self, embedding: Tensor) -> None:
        """A forward pass begins."""
        self._next, self._updates = 0, []

    def note_read(self, stream: Any, site: int) -> None:
        """Reads are not looked at."""

    def note_write(self, stream: Any, site: int, update: Tensor) -> None:
        """An update is about to be written."""
        if site != self._next:
            return
        self._next = site + 1
        number = self._block_of[site]
        self._updates.append(wide(update))
        if site + 1 < self.blocks[number].stop:
            return
        updates, self._updates = self._updates, []
        rows = [
            torch.stack([total(a * b) for b in updates[: i + 1]]) for i, a in enumerate(updates)
        ]
        lower = torch.stack([torch.cat((r, r.new_zeros(len(rows) - len(r)))) for r in rows])
        self._tally.add(number, "gram", lower + lower.tril(-1).T, update.shape[:-1].numel())

    def gram(self, block: int) -> Tensor:
        """The Gram matrix (m, m) of a block, in float64 on the CPU, mean over tokens.

        Raises:
            UserError: No forward pass was seen.
        """
        mean = self._tally.mean(block, "gram")
        if mean is None:
            raise UserError("nothing was seen of the block: run the model in the context")
        return mean

    def result(self) -> dict[str, Any]:
        """What bases capture of each block, as JSON values. Shares are of tr(G), from 0 to 1.

        `blocks` has one entry a block:

        - `sites`: first, and one past the last; `size` m; `energy`: tr(G) / (m D), the mean square
          of an update;
        - `captured`: by set of bases, `share`, and `of_rest`, the part of what the state leaves
          that the others add. Sets are `state`; `state + X` for each basis X in use, with its
          learned coefficients where it has such; `in use`, all of them; `state + phase + split`;
          and `state + initial X` where X is learned. A set whose signs do not fit the block is
          left out;
        - `pca`: shares of the eigenvectors of G, largest first, and `cumulative`, the most that any
          1, 2, .. m coefficients can capture; `residual_cumulative` the same of what the state
          leaves, by vectors besides the state;
        - `walsh`: where m is a power of two, the Walsh-Hadamard basis in the order of energy:
          `sequency` (sign changes: 0 is the state, 1 the split, m - 1 the phase), `shares`,
          `cumulative`; else None;
        - `third`: what one more vector would add to the bases in use, as `share` and `of_rest`
          (of what these leave): `best` the best coefficients at all, `signs` the best pattern of
          signs that a search finds (each with its `coefficients`), `walsh` the best of that basis
          with its `sequency`, or None.

        Raises:
            UserError: No forward pass was seen, or updates that are not finite.
        """
        return {
            "format_version": FORMAT_VERSION,
            "bases": ["state", *_bases(self.policy)],
            "blocks": [self._block(number) for number in range(len(self.blocks))],
        }

    def _block(self, number: int) -> dict[str, Any]:
        block, gram = self.blocks[number], self.gram(number)
        if not gram.isfinite().all():
            raise UserError(
                f"updates of block {number} are not finite: the model has diverged, and its bases "
                "hold nothing"
            )
        size = len(block)
        sets = self._sets(block)
        state = captured(gram, sets["state"])
        used = sets["in use"]
        has_walsh = size & (size - 1) == 0
        kept = {name: captured(gram, vectors) for name, vectors in sets.items()}
        values, rest = spectrum(gram), spectrum(gram, without=sets["state"])
        return {
            "sites": [block.start, block.stop],
            "size": size,
            "energy": gram.trace().item() / (size * self.policy.dim),
            "captured": {
                name: {"share": share, "of_rest": _part(share - state, 1 - state)}
                for name, share in kept.items()
            },
            "pca": {
                "shares": values,
                "cumulative": curve(values),
                "residual_cumulative": [_part(share, 1 - state) for share in curve(rest)],
            },
            "walsh": _walsh_curve(gram) if has_walsh else None,
            "third": _third(gram, used, kept["in use"], has_walsh=has_walsh),
        }

    def _sets(self, block: range) -> dict[str, Tensor]:
        """Vectors (m, k) of each set of bases, by its name."""
        policy = self.policy
        kinds = [policy.kinds[site % len(policy.kinds)] for site in block]
        ones = torch.ones(len(block), 1, dtype=torch.float64)
        used = _coefficients(policy, block)
        sets = {"state": ones}
        for index, name in enumerate(_bases(policy)):
            sets[f"state + {name}"] = torch.cat((ones, used[:, index : index + 1]), 1)
            if isinstance(policy, WAVPolicy) and policy.basis is not None:
                column = torch.tensor([[policy.signs[site][index]] for site in block]).double()
                sets[f"state + initial {name}"] = torch.cat((ones, column), 1)
        sets["in use"] = torch.cat((ones, used), 1)
        # sublayers of other kinds may have no phase
        with suppress(UserError):
            both = torch.tensor([signs("phase", kinds), signs("split", kinds)]).double().T
            sets["state + phase + split"] = torch.cat((ones, both), 1)
        return sets


def _third(gram: Tensor, used: Tensor, share: float, *, has_walsh: bool) -> dict[str, Any]:
    def described(vector: Tensor) -> dict[str, Any]:
        added = captured(gram, torch.cat((used, vector[:, None]), 1)) - share
        return {
            "share": added,
            "of_rest": _part(added, 1 - share),
            "coefficients": vector.tolist(),
        }

    best, pattern = best_addition(gram, used), best_signs(gram, used)
    found: dict[str, Any] = {
        "best": None if best is None else described(best),
        "signs": None if pattern is None else described(pattern),
        "walsh": None,
    }
    if has_walsh:
        basis = walsh(len(gram))
        rows = [described(vector) for vector in basis]
        sequency = max(range(len(rows)), key=lambda i: rows[i]["share"])
        found["walsh"] = {"sequency": sequency, **rows[sequency]}
    return found


def _walsh_curve(gram: Tensor) -> dict[str, Any]:
    basis = walsh(len(gram))
    shares = ((basis @ gram) * basis).sum(1) / len(gram) / gram.trace().clamp_min(_TINY)
    ordered = shares.sort(descending=True, stable=True)
    return {
        "sequency": ordered.indices.tolist(),
        "shares": ordered.values.tolist(),
        "cumulative": curve(ordered.values.tolist()),
    }


_TINY = torch.finfo(torch.float64).tiny


def _part(share: float, rest: float) -> float:
    """A share of a rest; nothing where nothing is left but rounding."""
    return share / rest if rest > 1e-12 else 0.0


def _bases(policy: Policy[Any]) -> tuple[str, ...]:
    return policy.bases if isinstance(policy, RoutedPolicy) else ()


@torch.no_grad()
def _coefficients(policy: Policy[Any], block: range) -> Tensor:
    """Of the bases in use, (m, k)."""
    rows = [policy.coefficients(site) for site in block] if isinstance(policy, RoutedPolicy) else []
    found = torch.zeros(len(block), len(_bases(policy)), dtype=torch.float64)
    for row, values in zip(found, rows, strict=False):
        row.copy_(torch.tensor([float(value) for value in values]))
    return found


def blocks_of(policy: Policy[Any], num_blocks: int) -> list[range]:
    """Sites of each block; of `num_blocks` where the method has none of at least two sites."""
    own: list[range] = getattr(policy, "blocks", [])
    if any(len(block) > 1 for block in own):
        return own
    layers = -(-policy.num_layers // min(num_blocks, policy.num_layers))
    return block_sites(policy.num_layers, len(policy.kinds), layers)
