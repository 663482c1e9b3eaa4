r"""Energy of vectors in a Gram matrix: what of a set of updates their span captures.

m updates, G (m, m) their Gram matrix, B (m, k) coefficients. All in float64.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

_RANK = 1e-10
"""Singular values this small beside the largest are of vectors that depend on the others."""


def captured(gram: Tensor, vectors: Tensor) -> float:
    """Share of tr(G) in the span of vectors (m, k); they may depend on each other."""
    basis = orthonormal(vectors)
    energy = gram.trace().item()
    return torch.trace(basis.T @ gram @ basis).item() / energy if energy > 0 else 0.0


def orthonormal(vectors: Tensor) -> Tensor:
    """An orthonormal basis (m, rank) of the span of vectors (m, k)."""
    if vectors.shape[1] == 0:
        return vectors
    left: Tensor
    left, sizes, _ = torch.linalg.svd(vectors, full_matrices=False)
    return left[:, sizes > _RANK * sizes.max()]


def remainder(gram: Tensor, without: Tensor) -> Tensor:
    """(I - P) G (I - P), with P the projection on the span of `without` (m, k)."""
    basis = orthonormal(without)
    rest = torch.eye(len(gram), dtype=gram.dtype) - basis @ basis.T
    return rest @ gram @ rest


def spectrum(gram: Tensor, *, without: Tensor | None = None) -> list[float]:
    """Eigenvalues, largest first, as shares of tr(G): each is what one more vector captures.

    Args:
        gram: G.
        without: Vectors (m, k) whose span is taken out first; shares stay those of all of tr(G).
    """
    energy = gram.trace().item()
    rest = gram if without is None else remainder(gram, without)
    values = torch.linalg.eigvalsh(rest).flip(0).clamp_min(0.0)
    return (values / energy).tolist() if energy > 0 else [0.0] * len(gram)


def curve(shares: Sequence[float]) -> list[float]:
    """Cumulative sums."""
    return list(itertools.accumulate(shares))


def walsh(size: int) -> Tensor:
    """Walsh-Hadamard vectors (m, m) of m a power of two, rows ordered by their changes of sign."""
    assert size & (size - 1) == 0, "only powers of two"
    rows = torch.ones(1, 1, dtype=torch.float64)
    while len(rows) < size:
        rows = torch.cat((torch.cat((rows, rows), 1), torch.cat((rows, -rows), 1)))
    changes = (rows[:, 1:] != rows[:, :-1]).sum(1)
    return rows[changes.argsort()]


def best_addition(gram: Tensor, used: Tensor) -> Tensor | None:
    """The unit vector (m,) that captures most besides the span of `used` (m, k).

    Its largest coefficient is positive. None where nothing is left.
    """
    rest = remainder(gram, used)
    if rest.trace().item() <= _RANK * gram.trace().item():
        return None
    vector: Tensor = torch.linalg.eigh(rest).eigenvectors[:, -1]
    return vector * vector[vector.abs().argmax()].sign()


def best_signs(gram: Tensor, used: Tensor) -> Tensor | None:
    """A pattern of signs (m,) that captures much besides the span of `used` (m, k).

    Found by flipping single signs of the best vector's while that helps: at least as good as any
    pattern one flip away, not proven the best of all. None where nothing is left.
    """
    best = best_addition(gram, used)
    if best is None:
        return None
    basis = orthonormal(used)
    free = torch.eye(len(gram), dtype=gram.dtype) - basis @ basis.T
    rest = free @ gram @ free

    def gains(patterns: Tensor) -> Tensor:
        """Energy along what each pattern (.., m) has besides the span."""
        length = ((patterns @ free) * patterns).sum(-1)
        energy = ((patterns @ rest) * patterns).sum(-1)
        return torch.where(length > _RANK * len(gram), energy / length.clamp_min(_RANK), 0.0)

    pattern = torch.where(best >= 0, 1.0, -1.0).to(gram.dtype)
    flips = 1.0 - 2.0 * torch.eye(len(gram), dtype=gram.dtype)
    while True:
        found = gains(pattern * flips)
        if found.max() <= gains(pattern) * (1 + _RANK):
            # of the two signs that mean the same, the one that begins with a plus
            return pattern * pattern[0]
        pattern = pattern * flips[found.argmax()]
