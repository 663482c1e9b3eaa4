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
from resroute.residual.capture import Capture as Capture
from resroute.residual.capture import capture as capture
from resroute.residual.findings import Finding as Finding
from resroute.residual.health import health as health
from resroute.residual.trajectory import Trajectory as Trajectory
from resroute.residual.trajectory import trajectory as trajectory
from resroute.residual.ablate import without_layer as without_layer
from resroute.residual.ablate import without_sites as without_sites
from resroute.residual.ablate import without_sources as without_sources
from resroute.residual.stack import RoutedStack as RoutedStack
from resroute.residual import interchange as interchange

__all__ = [
    "HAARES",
    "WAV",
    "BlockAttnRes",
    "Capture",
    "DeltaAttnRes",
    "Finding",
    "FullAttnRes",
    "LayerScale",
    "Policy",
    "PreNorm",
    "ReZero",
    "ResidualConfig",
    "RoutedStack",
    "Stream",
    "Trajectory",
    "capture",
    "health",
    "interchange",
    "trajectory",
    "without_layer",
    "without_sites",
    "without_sources",
]
