"""Named model shapes: functions that return a configuration."""

from collections.abc import Callable

from resroute.model.gpt import GPTConfig
from resroute.residual import WAV, ResidualConfig


def paper(
    num_layers: int = 48,
    *,
    vocab_size: int,
    context: int = 256,
    residual: ResidualConfig | None = None,
) -> GPTConfig:
    """The WAV paper's depths, 12, 24 and 48 layers, at width 512: about 201 M parameters at 48.

    Width and SwiGLU of four times the width follow from the sizes that the paper's second version
    names; heads, context and block count are our choice.

    Args:
        num_layers: L.
        vocab_size: V.
        context: Most tokens that attend to each other.
        residual: The method; None is `WAV()`.

    Raises:
        UserError: A size out of its range, as `GPTConfig`.
    """
    return _shape(num_layers, vocab_size, context, residual, dim=512, num_heads=8)


def small(
    num_layers: int = 24,
    *,
    vocab_size: int,
    context: int = 256,
    residual: ResidualConfig | None = None,
) -> GPTConfig:
    """Width 128, for an hour or more on a CPU: about 6.3 M parameters at 24 layers.

    Args:
        num_layers: L.
        vocab_size: V.
        context: Most tokens that attend to each other.
        residual: The method; None is `WAV()`.

    Raises:
        UserError: A size out of its range, as `GPTConfig`.
    """
    return _shape(num_layers, vocab_size, context, residual, dim=128, num_heads=4)


def tiny(
    num_layers: int = 24,
    *,
    vocab_size: int,
    context: int = 256,
    residual: ResidualConfig | None = None,
) -> GPTConfig:
    """Width 48, for minutes on a CPU: about 0.9 M parameters at 24 layers.

    Args:
        num_layers: L.
        vocab_size: V.
        context: Most tokens that attend to each other.
        residual: The method; None is `WAV()`.

    Raises:
        UserError: A size out of its range, as `GPTConfig`.
    """
    return _shape(num_layers, vocab_size, context, residual, dim=48, num_heads=3)


def _shape(
    num_layers: int,
    vocab_size: int,
    context: int,
    residual: ResidualConfig | None,
    *,
    dim: int,
    num_heads: int,
) -> GPTConfig:
    return GPTConfig(
        vocab_size=vocab_size,
        context=context,
        num_layers=num_layers,
        num_heads=num_heads,
        dim=dim,
        residual=residual or WAV(),
    )


PRESETS: dict[str, Callable[..., GPTConfig]] = {"paper": paper, "small": small, "tiny": tiny}
"""Presets by the name that `resroute train --preset` takes."""
