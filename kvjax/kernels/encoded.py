"""Pools that attention reads through a decoder, or as one half of wider rows."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, no_type_check, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Num

LANES = 128
"""Numbers of a row that TPUs keep as it is."""
FINER = "+"
"""Behind the name of a form: blocks may have finer codes in others."""


class Factors(NamedTuple):
    """Rows as small numbers, each row with a factor: codes · scale, turned.

    None in place of a factor is 1. Codes that have one are finite whatever was stored.
    """

    codes: Num[Array, "*n d"]
    scale: Float[Array, "*n"] | None = None

    @property
    def rows(self) -> Float[Array, "*n d"]:
        """Codes times factors, in float32."""
        codes = self.codes.astype(jnp.float32)
        return codes if self.scale is None else codes * self.scale[..., None].astype(jnp.float32)


@runtime_checkable
class Decoder(Protocol):
    """What makes rows of a floating-point type of what is stored; hashable."""

    def decode(self, stored: Any) -> Float[Array, "*n d"]: ...


class _OfBoth:
    """What is stored of keys, or of values, in an array of both."""

    both: Array

    @property
    def shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> jnp.dtype:
        return self.both.dtype

    def __getitem__(self, blocks: Int32[Array, "*n"]) -> Num[Array, "..."]:
        """What belongs to some blocks."""
        return self.of(self.both[blocks])

    def of(self, rows: Num[Array, "..."]) -> Num[Array, "..."]:
        """This half of some blocks of the array."""
        raise NotImplementedError


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Half(_OfBoth):
    """A pool [N, b, w] of keys or values where a row of each make one row of an array.

    TPUs keep rows of 128 numbers, or a multiple, as they are, and turn around a pool of others.
    Where both are short, a row of the array has those of several KVs (`fold_of`): the first parts
    of a block's rows have its first KVs, and so on.
    """

    both: Num[Array, "N rows w2"]
    """Keys first, then values, then zeros up to a multiple of 128 numbers."""
    width: int = dataclasses.field(metadata={"static": True})
    of_values: bool = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        *blocks, rows, _ = self.both.shape
        return (*blocks, rows * fold_of(self.width), self.width)

    def of(self, rows: Num[Array, "*n rows w2"]) -> Num[Array, "*n b w"]:
        both = unfolded(rows, self.width)
        return both[..., self.width :] if self.of_values else both[..., : self.width]


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HalfNumbers(_OfBoth):
    """Numbers [N, b], one of each key or value of a pool, where those of a block's keys are a row
    of an array and those of its values the next, with zeros up to a multiple of 128 behind them."""

    both: Num[Array, "N 2 w"]
    size: int = dataclasses.field(metadata={"static": True})
    """b, KVs of a block."""
    of_values: bool = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.both.shape[:-2], self.size)

    def of(self, rows: Num[Array, "*n 2 w"]) -> Num[Array, "*n b"]:
        return rows[..., int(self.of_values), : self.size]


def fold_of(width: int) -> int:
    """How many KVs one row of 128 numbers has, a power of two, of keys and values so wide; 1 where
    it takes more."""
    fold = 1
    while 4 * fold * width <= LANES:
        fold *= 2
    return fold


def folded(both: Num[Array, "*n b w2"]) -> Num[Array, "*n rows w"]:
    """Rows of keys and values as `Half.both` has those of blocks."""
    *blocks, b, width = both.shape
    fold = fold_of(width // 2)
    rows = jnp.swapaxes(both.reshape(*blocks, fold, b // fold, width), -3, -2)
    rows = rows.reshape(*blocks, b // fold, fold * width)
    return jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, -rows.shape[-1] % LANES)])


def unfolded(rows: Num[Array, "*n rows w"], width: int) -> Num[Array, "*n b w2"]:
    """The rows of keys and values, each so wide, in such blocks."""
    fold = fold_of(width)
    if fold == 1:
        return rows[..., : 2 * width]
    *blocks, count, _ = rows.shape
    parts = rows[..., : 2 * width * fold].reshape(*blocks, count, fold, 2 * width)
    return jnp.swapaxes(parts, -3, -2).reshape(*blocks, fold * count, 2 * width)


def is_half(x: object) -> bool:
    """Whether it is a half of an array: a leaf of what a pool stores."""
    return isinstance(x, _OfBoth)


def without_halves(stored: Any) -> Any:
    """What is stored, with an array of its own in place of each half."""
    return jax.tree.map(lambda x: x.of(x.both) if is_half(x) else x, stored, is_leaf=is_half)


class Codes(NamedTuple):
    """Rows as a pool stores them, for kernels that make numbers of them."""

    stored: Num[Array, "*n w"] | Half
    """What is stored of the numbers: w of d of them where a byte holds several."""
    scale: Float[Array, "*n"] | HalfNumbers


@runtime_checkable
class Coded(Protocol):
    """A decoder of stored numbers that kernels may read by themselves."""

    @property
    def form(self) -> str:
        """What the numbers are, by a name that kernels know."""
        ...

    def codes(self, stored: Any) -> Codes:
        """What is stored, of which nothing is computed."""
        ...


@runtime_checkable
class Factored(Protocol):
    """A decoder whose rows have factors: products with rows are products with their codes, and
    need neither rows nor turns of them."""

    def factors(self, stored: Any) -> Factors: ...

    def turned(self, rows: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        """Rows in the basis of the codes, or back: an orthogonal matrix that is its own inverse."""
        ...


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Encoded:
    """A pool [N, b, d] of keys or values in another form, in place of the array.

    Its shape and dtype are those of the rows. Device kernels read the forms that they know as they
    are stored; others are left to the XLA path, which reads the blocks that it gathers.
    """

    stored: Any
    """Arrays, or halves of some (a pytree), with leading axes [N, b]."""
    decoder: Decoder = dataclasses.field(metadata={"static": True})
    fine: Int32[Array, " N"] | None = None
    """The block whose rows are to be added to those of each, stored in the same way; N where there
    is none. None where there are none at all. Of keys and of values it is the same one."""

    @property
    def _rows(self) -> jax.ShapeDtypeStruct:
        return jax.eval_shape(lambda x: self.decoder.decode(without_halves(x)), self.stored)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._rows.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> jnp.dtype:
        return self._rows.dtype

    def _blocks(self, blocks: Int32[Array, "*n"]) -> Any:
        return jax.tree.map(lambda x: x[blocks], self.stored, is_leaf=is_half)

    def _sum(
        self, make: Callable[[Any], Float[Array, "..."]], blocks: Int32[Array, "*n"]
    ) -> Float[Array, "..."]:
        """What is made of some blocks, and of those whose rows are added to theirs."""
        rows = make(self._blocks(blocks))
        if self.fine is None:
            return rows
        num_blocks = self.fine.shape[0]
        at = self.fine.at[blocks].get(mode="fill", fill_value=num_blocks)
        return rows + jnp.where((at < num_blocks)[..., None, None], make(self._blocks(at)), 0)

    def __getitem__(self, blocks: Int32[Array, "*n"]) -> Float[Array, "..."]:
        """The rows of some blocks."""
        return self._sum(self.decoder.decode, blocks)

    @property
    def form(self) -> str:
        """What is stored, by a name that kernels know; "encoded" if they cannot."""
        if not isinstance(self.decoder, Coded):
            return "encoded"
        return self.decoder.form + (FINER if self.fine is not None else "")

    @property
    def codes(self) -> Codes:
        """What is stored, for kernels."""
        assert isinstance(self.decoder, Coded)
        return self.decoder.codes(self.stored)

    def factors(self, blocks: Int32[Array, "*n"]) -> Factors:
        """The rows of some blocks, as far as their decoder goes with them by factors."""
        if not isinstance(self.decoder, Factored):
            return Factors(self[blocks])
        factors = self.decoder.factors
        if self.fine is None:
            return factors(self._blocks(blocks))
        return Factors(self._sum(lambda stored: factors(stored).rows, blocks))


def form_of(pool: object) -> str | None:
    """What a pool stores in place of rows: the name of a form, None where it is an array (or the
    shape of one)."""
    return pool.form if isinstance(pool, Encoded) else None


def fine_table(
    fine: Int32[Array, " N"],
    table: Int32[Array, "rows M"],
    lengths: Int32[Array, " rows"],
    block_size: int,
) -> Int32[Array, "rows M"]:
    """The blocks with finer codes of those that heads hold, N where there are none."""
    num_blocks = fine.shape[0]
    held = jnp.arange(table.shape[1]) * block_size < lengths[:, None]
    return fine.at[jnp.where(held, table, num_blocks)].get(mode="fill", fill_value=num_blocks)


def half_of(pool: object) -> bool | None:
    """Which half of an array's rows those of a pool, or its codes, are: False for that of keys,
    True for that of values, None if they are no halves."""
    leaves = jax.tree.leaves(pool.stored if isinstance(pool, Encoded) else pool, is_leaf=is_half)
    return next((x.of_values for x in leaves if isinstance(x, Half)), None)


def factors_of(pool: Array | Encoded | Half, blocks: Int32[Array, "*n"]) -> Factors:
    """The rows of some blocks of a pool, as factors."""
    return pool.factors(blocks) if isinstance(pool, Encoded) else Factors(pool[blocks])


def turned(pool: Array | Encoded | Half, rows: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
    """Rows in the basis of a pool's codes, or back."""
    if isinstance(pool, Encoded) and isinstance(pool.decoder, Factored):
        return pool.decoder.turned(rows)
    return rows
