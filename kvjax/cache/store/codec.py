"""How keys and values become what the pool stores, and what attention reads of it."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.checks import check_whole
from kvjax.errors import UserError
from kvjax.kernels import Encoded


@dataclasses.dataclass(frozen=True)
class Codec:
    """How rows of keys or values are stored: a frozen, hashable value that steps are compiled from.

    A subclass gives `encode` and `decode`. What is stored of a row follows from that row alone, so
    that moving it is a copy of bytes; how many these are follows from `encode`.
    """

    dtype: str = "float32"
    """Of the rows that attention computes with."""

    @property
    def name(self) -> str:
        """What reports call it."""
        return type(self).__name__.lower()

    @property
    def of_keys(self) -> "Codec":
        """What stores keys."""
        return self

    @property
    def of_values(self) -> "Codec":
        """What stores values."""
        return self

    @property
    def of_pool(self) -> "Codec":
        """What stores the keys and values of the pool."""
        return self

    @property
    def window(self) -> int:
        """Newest KVs of each head that lie beside the pool, too, as they are computed."""
        return 0

    @property
    def refines(self) -> bool:
        """Whether free blocks of the pool hold finer codes of others."""
        return False

    def decoding_to(self, dtype: str) -> "Codec":
        """The same with rows of another dtype."""
        return dataclasses.replace(self, dtype=dtype)

    def kv_bytes(self, head_dim: int) -> int:
        """Bytes that are stored of one KV."""
        return self.of_keys.row_bytes(head_dim) + self.of_values.row_bytes(head_dim)

    def check(self, head_dim: int) -> None:
        """Refuse a head dimension whose rows cannot be stored.

        Raises:
            UserError: names what can be.
        """

    def encode(self, rows: Float[Array, "*n d"]) -> Any:
        """What is stored of some rows: arrays (a pytree) with the same leading axes."""
        raise NotImplementedError

    def decode(self, stored: Any) -> Float[Array, "*n d"]:
        """The rows, in `dtype`, of what `encode` gave."""
        raise NotImplementedError

    def operand(self, stored: Any) -> Any:
        """What attention takes for a pool [N, b, d] of keys or values.

        An array where kernels read what is stored as it is; by default something that decodes the
        blocks it is indexed by.
        """
        return Encoded(stored, self)

    def stored_shapes(self, *shape: int) -> Any:
        """Shapes and dtypes of what is stored of rows of this shape, the last axis d."""
        return jax.eval_shape(self.encode, jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype)))

    def row_bytes(self, head_dim: int) -> int:
        """Bytes that are stored of one key or value."""
        leaves = jax.tree.leaves(self.stored_shapes(1, head_dim))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@dataclasses.dataclass(frozen=True)
class Pair(Codec):
    """Keys by one codec and values by another: errors of keys are exponents of attention.

    Source: DiffKV (2024), section 4.1 (keys of 8 bits and values of 4).
    """

    keys: Codec = Codec()
    values: Codec = Codec()

    @property
    def name(self) -> str:
        """The bits of both where they are whole numbers, as "k8v4"."""
        names = self.keys.name, self.values.name
        if all(name.startswith("int") for name in names):
            return "k{}v{}".format(*(name.removeprefix("int") for name in names))
        return "{} and {}".format(*names)

    @property
    def of_keys(self) -> Codec:
        return self.keys

    @property
    def of_values(self) -> Codec:
        return self.values

    def decoding_to(self, dtype: str) -> "Pair":
        return Pair(dtype, self.keys.decoding_to(dtype), self.values.decoding_to(dtype))

    def check(self, head_dim: int) -> None:
        self.keys.check(head_dim)
        self.values.check(head_dim)


@dataclasses.dataclass(frozen=True)
class Plain(Codec):
    """Rows are stored as they are computed."""

    @property
    def name(self) -> str:
        return self.dtype

    def encode(self, rows: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        return rows.astype(self.dtype)

    def decode(self, stored: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        return stored

    def operand(self, stored: Any) -> Any:
        return stored


@dataclasses.dataclass(frozen=True)
class Rounded(Plain):
    """Rows are stored in a narrower floating-point type, which attention reads as it is."""

    stored: str = "bfloat16"

    @property
    def name(self) -> str:
        return self.stored

    def encode(self, rows: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        return rows.astype(self.stored)

    def decode(self, stored: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        return stored.astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class OfCodes(Codec):
    """Codes of all KVs, and something more precise of some."""

    codes: Codec = Codec()
    """What stores the pool."""
    beside: ClassVar[tuple[str, str]]
    """What rows as they are have none of, and a name that has."""

    def __post_init__(self):
        """
        Raises:
            UserError: there are no codes.
        """
        if isinstance(self.codes, Plain):
            what, name = self.beside
            raise UserError(
                f"cache_dtype {self.name}: {self.codes.name} has no codes that {what}; give "
                f"{self.codes.name}, or {name}"
            )

    @property
    def of_keys(self) -> Codec:
        return self.codes.of_keys

    @property
    def of_values(self) -> Codec:
        return self.codes.of_values

    @property
    def of_pool(self) -> Codec:
        return self.codes.of_pool

    @property
    def refines(self) -> bool:
        return self.codes.refines

    def decoding_to(self, dtype: str) -> "OfCodes":
        return dataclasses.replace(self, dtype=dtype, codes=self.codes.decoding_to(dtype))

    def check(self, head_dim: int) -> None:
        self.codes.check(head_dim)


@dataclasses.dataclass(frozen=True)
class Windowed(OfCodes):
    """Codes of all KVs, and beside the pool the newest of each head as they are computed.

    Source: KIVI (2024), algorithm 1, "residual": the newest tokens in full precision. There they
    are coded when they leave it; here they are coded at once, and attention reads them instead.
    """

    size: int = 16
    beside = "a window could stand in for", "int4w16"

    def __post_init__(self):
        """
        Raises:
            UserError: there are no codes, or no such window.
        """
        super().__post_init__()
        check_whole(f"cache_dtype {self.name}: a window of", self.size, 1)

    @property
    def name(self) -> str:
        """As "int4w16"."""
        return f"{self.codes.name}w{self.size}"

    @property
    def window(self) -> int:
        return self.size


@dataclasses.dataclass(frozen=True)
class Refined(OfCodes):
    """Codes of all KVs, and in blocks that are free finer codes of those that are worth most, coded
    as these are (`kvjax.cache.store.fine`)."""

    beside = "could be finer", "int4+"

    @property
    def name(self) -> str:
        """As "int4+"."""
        return f"{self.codes.name}+"

    @property
    def refines(self) -> bool:
        return True
