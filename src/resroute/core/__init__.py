"""The maths as pure functions of tensors: no modules, no files, no switches."""

from resroute.core.basis import SIGN_RULES as SIGN_RULES
from resroute.core.basis import block_sites as block_sites
from resroute.core.basis import sign_rule as sign_rule
from resroute.core.basis import signs as signs
from resroute.core.mixer import Source as Source
from resroute.core.mixer import depth_mix as depth_mix
from resroute.core.mixer import depth_weights as depth_weights
from resroute.core.rms import accumulate as accumulate
from resroute.core.rms import compute_dtype as compute_dtype
from resroute.core.rms import inverse_rms as inverse_rms
from resroute.core.rms import matching_factor as matching_factor

__all__ = [
    "SIGN_RULES",
    "Source",
    "accumulate",
    "block_sites",
    "compute_dtype",
    "depth_mix",
    "depth_weights",
    "inverse_rms",
    "matching_factor",
    "sign_rule",
    "signs",
]
