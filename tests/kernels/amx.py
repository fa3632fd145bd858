"""Which tests need a processor with AMX."""

import pytest

from kvjax.kernels import numba_tiles


def _there() -> bool:
    try:
        numba_tiles.check()
    except NotImplementedError:
        return False
    return True


needs_amx = pytest.mark.skipif(not _there(), reason="needs AMX")
