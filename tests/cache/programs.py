"""The jitted functions of the cache with abstract arguments, for tests that compile but not run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxtyping

from kvjax import cache as kv
from kvjax.cache.store import unshare_slots


@contextmanager
def unchecked() -> Iterator[None]:
    """No run-time checks of signatures: abstract arrays and pools of integers do not pass them."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


class Shapes(NamedTuple):
    """Static shapes of a pool; T is the prompt length of the functions that write one."""

    S: int = 8
    L: int = 8
    H: int = 4
    M: int = 16
    N: int = 4096
    b: int = 16
    d: int = 64
    T: int = 256
    dtype: Any = jnp.float32


class Program(NamedTuple):
    """A function and its abstract arguments, the cache first; whether it returns the cache."""

    fn: Callable
    args: tuple
    gives_cache: bool = True

    def compile(self):
        """Compiled with the cache donated, where it comes back."""
        donate = (0,) if self.gives_cache else ()
        with unchecked():
            return jax.jit(self.fn, donate_argnums=donate).lower(*self.args).compile()

    def jaxpr(self):
        with unchecked():
            return jax.make_jaxpr(self.fn)(*self.args).jaxpr


def abstract_cache(
    shapes: Shapes, sharing: bool = False, codec: kv.Codec | None = None
) -> kv.PagedCache:
    with unchecked():
        return jax.eval_shape(
            lambda: kv.init_cache(
                num_slots=shapes.S,
                num_layers=shapes.L,
                num_kv_heads=shapes.H,
                head_dim=shapes.d,
                num_blocks=shapes.N,
                max_blocks_per_head=shapes.M,
                block_size=shapes.b,
                dtype=shapes.dtype,
                codec=codec,
                sharing=sharing,
            )
        )


def bytes_of(*arrays) -> int:
    return sum(x.size * x.dtype.itemsize for x in arrays)


def pool_bytes(cache: kv.PagedCache) -> int:
    """Bytes of the keys, values and their metadata."""
    return bytes_of(*jax.tree.leaves(cache.kv), cache.metric, cache.position)


def programs(shapes: Shapes) -> dict[str, Program]:
    """Every public operation of the cache."""
    s = shapes
    cache, sharing = abstract_cache(s), abstract_cache(s, sharing=True)

    def ints(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def floats(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    slots = jax.ShapeDtypeStruct((s.S,), jnp.bool_)
    tokens = floats(s.L, s.T, s.H, s.d)
    prompt = (ints(), tokens, tokens, floats(s.L, s.H, s.T), ints())
    new = floats(s.L, s.S, s.H, s.d)
    group = (ints(s.S), ints(s.S))
    with unchecked():
        schedule = jax.eval_shape(kv.schedule_evictions, cache, *group)

    def write_kept(cache, slot, k, v, metric, length, index, count):
        return kv.write_prompt(cache, slot, k, v, metric, length, kept_index=index, kept_len=count)

    return {
        "allocate": Program(kv.allocate, (cache, ints(s.S, s.L, s.H))),
        "write_prompt": Program(kv.write_prompt, (cache, *prompt)),
        "write_prompt, kept": Program(
            write_kept, (cache, *prompt, ints(s.L, s.H, s.T // 2), ints(s.L, s.H))
        ),
        "write_survivors": Program(kv.write_survivors, (cache, *prompt, ints())),
        "append": Program(kv.append, (cache, new, new, slots)),
        "begin_append": Program(kv.begin_append, (cache, slots)),
        "release": Program(kv.release, (cache, slots)),
        "schedule_evictions": Program(kv.schedule_evictions, (cache, *group), gives_cache=False),
        "move_cache": Program(kv.move_cache, (cache, schedule)),
        "compress": Program(kv.compress, (cache, *group)),
        "compress in steps": Program(
            partial(kv.compress, max_kvs_per_step=s.M * s.b * s.H), (cache, *group)
        ),
        "share": Program(kv.share, (sharing, ints(), ints())),
        "unshare_slots": Program(unshare_slots, (sharing, slots)),
        "sharing, write_prompt": Program(kv.write_prompt, (sharing, *prompt)),
        "sharing, append": Program(kv.append, (sharing, new, new, slots)),
        "sharing, release": Program(kv.release, (sharing, slots)),
        "sharing, compress": Program(kv.compress, (sharing, *group)),
    }


def equations(jaxpr):
    """All equations of a jaxpr and of the jaxprs inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)
