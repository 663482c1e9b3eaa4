"""The operations of depth routing, fast: several backends, one signature, one dispatcher."""

from resroute.ops.dispatch import BACKENDS as BACKENDS
from resroute.ops.dispatch import Choice as Choice
from resroute.ops.dispatch import backend as backend
from resroute.ops.dispatch import choose as choose
from resroute.ops.dispatch import native_available as native_available
from resroute.ops.dispatch import operators as operators
from resroute.ops.dispatch import prepare as prepare
from resroute.ops.dispatch import set_backend as set_backend
from resroute.ops.forms import MATCHING as MATCHING
from resroute.ops.forms import SiteForm as SiteForm
from resroute.ops.functions import block_read as block_read
from resroute.ops.functions import site as site

__all__ = [
    "BACKENDS",
    "MATCHING",
    "Choice",
    "SiteForm",
    "backend",
    "block_read",
    "choose",
    "native_available",
    "operators",
    "prepare",
    "set_backend",
    "site",
]
