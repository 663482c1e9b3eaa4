"""The lean backend: plain torch with hand-written gradients. Registered as it is imported."""

from collections.abc import Sequence

from resroute.ops.lean_block import block_read_backward, block_read_forward
from resroute.ops.lean_site import site_backward, site_forward
from resroute.ops.registry import Operators, register_fakes, register_python

OPERATORS = Operators(site_forward, site_backward, block_read_forward, block_read_backward)


class _Layout:
    def site_saved(
        self, rows: Sequence[int], num_bases: int, has_prior: bool, has_gain: bool
    ) -> Sequence[int]:
        count = 3 * num_bases + has_prior if num_bases else 0
        return (count + has_gain, *rows) if count + has_gain else (0,)

    def block_saved(self, rows: Sequence[int], queries: int, sources: int) -> Sequence[int]:
        return (sources, queries, *rows)


register_python("lean", OPERATORS)
register_fakes("lean", _Layout())
