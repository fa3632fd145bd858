"""Moving KVs inside the pool on Hopper GPUs: the work follows the moves there are.

Programs share the moves of all rows evenly (the work list of decode attention, with moves for
KVs). Each takes a tile of moves at a time: every warp copies its own slots to shared memory, all
wait, every warp copies them out again. Several programs per multiprocessor hide the wait.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32, Num

from kvjax.kernels import device
from kvjax.kernels.paged_attention import worklist
from kvjax.kernels.paged_attention.worklist import Head, Span

TILE = 64
"""Moves per tile."""
WARPS = 4
MINE = TILE // WARPS
"""Moves of a tile that one warp makes."""
PROGRAMS_PER_CORE = 4
ALIGNMENT = 128
"""Bytes to which copies of shared memory are aligned."""


def _move(
    rows,  # [rows, 4] i32, work list
    spans,  # [P, 8] i32, work list
    source,  # [rows, U] i32
    target,  # [rows, U] i32
    k,  # [N b, d], in place
    v,  # [N b, d], in place
    *,
    k_s,  # [tile, padded d]
    v_s,  # [tile, padded d]
    loaded,
):
    """Make the moves of one stretch of the work list."""
    span = Span.read(spans, lax.axis_index("program"))
    width = k.shape[1]

    def each_move(warp, row, begin, count, slots, make, otherwise=None):
        """`make(slot of the pool, place)` for this warp's moves of the tile at `begin`."""
        first = warp * MINE
        # All slots are read before the first copy: one wait for memory instead of sixteen.
        last = jnp.maximum(count - 1, 0)
        slot = [slots[row, jnp.minimum(begin + first + i, last)] for i in range(MINE)]
        for i in range(MINE):
            move = begin + first + i

            @pl.when(move < count)
            def _make(i=i):
                make(pl.ds(slot[i], 1), pl.ds(first + i, 1))

            if otherwise is not None:
                pl.when(move >= count)(otherwise)

    def move_tile(t, _, *, row: Head):
        begin = t * TILE

        @plgpu.warp_map
        def _load(warp):
            def load(there, here):
                place = (here, pl.ds(0, width))
                plgpu.copy_gmem_to_smem(k.at[there], k_s.at[place], loaded)
                plgpu.copy_gmem_to_smem(v.at[there], v_s.at[place], loaded)

            def skip():
                plgpu.barrier_arrive(loaded)
                plgpu.barrier_arrive(loaded)

            each_move(warp, row.row, begin, row.length, source, load, skip)

        plgpu.barrier_wait(loaded)

        @plgpu.warp_map
        def _store(warp):
            def store(there, here):
                place = (here, pl.ds(0, width))
                plgpu.copy_smem_to_gmem(k_s.at[place], k.at[there])
                plgpu.copy_smem_to_gmem(v_s.at[place], v.at[there])

            each_move(warp, row.row, begin, row.length, target, store)
            # Only the warp that began a copy can wait for it.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.loop(0, span.count)
    def _row(i):
        row = Head.read(rows, span.first + i, span, TILE)
        lax.fori_loop(row.begin, row.end, lambda t, x: move_tile(t, x, row=row), None)


def move_kvs(
    k: Num[Array, "N b d"],
    v: Num[Array, "N b d"],
    source: Int32[Array, "rows U"],
    target: Int32[Array, "rows U"],
    count: Int32[Array, " rows"],
    *,
    programs: int | None = None,
    interpret: Any = None,
) -> tuple[Num[Array, "N b d"], Num[Array, "N b d"]]:
    """See `kvjax.kernels.move_kvs`. `interpret`: an `InterpretGPUParams`."""
    if programs is None:
        programs = PROGRAMS_PER_CORE * device.of(k).cores
    work = worklist.build(count[None], TILE, programs)
    per_line = ALIGNMENT // k.dtype.itemsize
    padded = -(-k.shape[2] // per_line) * per_line
    pools = [jax.new_ref(x.reshape(-1, x.shape[2])) for x in (k, v)]
    plgpu.kernel(
        _move,
        out_type=(),
        grid=(programs,),
        grid_names=("program",),
        scratch_types={
            "k_s": plgpu.SMEM((TILE, padded), k.dtype),
            "v_s": plgpu.SMEM((TILE, padded), v.dtype),
            "loaded": plgpu.Barrier(num_arrivals=2 * TILE),
        },
        compiler_params=plgpu.CompilerParams(),
        interpret=interpret,
        kernel_name="move_kvs",
    )(work.heads, work.spans, source, target, *pools)
    new_k, new_v = (jax.freeze(x).reshape(k.shape) for x in pools)
    return new_k, new_v
