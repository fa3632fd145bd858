"""Which tests need a processor with AMX."""

import pytest

from kvjax.kernels import numba_tiles

needs_amx = pytest.mark.skipif(not numba_tiles.available(), reason="needs AMX")
