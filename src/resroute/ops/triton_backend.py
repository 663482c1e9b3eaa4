"""The Triton backend, for CUDA GPUs. Registered as it is imported, which imports triton."""

from collections.abc import Sequence

from resroute.ops.registry import Operators, register_fakes, register_python
from resroute.ops.triton_block import block_read_backward, block_read_forward
from resroute.ops.triton_site import site_backward, site_forward

OPERATORS = Operators(site_forward, site_backward, block_read_forward, block_read_backward)


class _Layout:
    def site_saved(
        self, rows: Sequence[int], num_bases: int, has_prior: bool, has_gain: bool
    ) -> Sequence[int]:
        return (2 + 4 * num_bases, *rows)

    def block_saved(self, rows: Sequence[int], queries: int, sources: int) -> Sequence[int]:
        return (*rows, queries, sources)


register_python("triton", OPERATORS)
register_fakes("triton", _Layout())
