"""Residual methods: a frozen configuration each, which builds the policy that carries it out."""

# ruff: noqa: I001 - methods register as they are imported: tables and legends keep this order
from resroute.residual.base import Policy as Policy
from resroute.residual.base import ResidualConfig as ResidualConfig
from resroute.residual.base import Stream as Stream
from resroute.residual.scaled import PreNorm as PreNorm
from resroute.residual.scaled import ReZero as ReZero
from resroute.residual.scaled import LayerScale as LayerScale
from resroute.residual.attnres import FullAttnRes as FullAttnRes
from resroute.residual.attnres import BlockAttnRes as BlockAttnRes
from resroute.residual.attnres import DeltaAttnRes as DeltaAttnRes
from resroute.residual.wav import WAV as WAV
from resroute.residual.wav import HAARES as HAARES

__all__ = [
    "HAARES",
    "WAV",
    "BlockAttnRes",
    "DeltaAttnRes",
    "FullAttnRes",
    "LayerScale",
    "Policy",
    "PreNorm",
    "ReZero",
    "ResidualConfig",
    "Stream",
]
