"""Attention matching in plain JAX, by products of whole matrices."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.kernels.linear import cholesky_inverted


def match_attention(
    q: Float[Array, "H Q d"],
    k: Float[Array, "H T d"],
    v: Float[Array, "H T d"],
    dropped: Bool[Array, "H T"],
    kept: Bool[Array, "H T"],
    most_mass: float,
    stiffness: float,
    drawn_back: float,
) -> tuple[Float[Array, "H T d"], Float[Array, "H T d"]]:
    """See `kvjax.kernels.match_attention`."""

    def matched(q, k, v, dropped, kept):
        return _matched(q, k, v, dropped, kept, most_mass, stiffness, drawn_back)

    # What is left of a difference has to be right: no products in fewer bits.
    with jax.default_matmul_precision("highest"):
        return jax.vmap(matched)(q, k, v, dropped, kept)


def _matched(
    q: Float[Array, "Q d"],
    k: Float[Array, "T d"],
    v: Float[Array, "T d"],
    dropped: Bool[Array, " T"],
    kept: Bool[Array, " T"],
    most_mass: float,
    stiffness: float,
    drawn_back: float,
) -> tuple[Float[Array, "T d"], Float[Array, "T d"]]:
    """Keys and values of one head."""
    there = dropped | kept
    # What nobody wrote may be no number, and so is 0 times it.
    old = k.astype(jnp.float32), jnp.where(there[:, None], v.astype(jnp.float32), 0)
    logit = q @ old[0].T
    held = jnp.where(there, logit, -1e30)
    weight = jnp.exp(held - jnp.max(held, axis=-1, keepdims=True))
    stays = jnp.where(kept, weight, 0)
    # Of what a query hardly looks at nothing may be left in float32, which tells it nothing: of
    # its rounding errors new values would be made.
    stays = jnp.where(jnp.sum(stays, axis=-1, keepdims=True) < 1e-30, 0, stays)
    mass, left = (jnp.maximum(jnp.sum(x, axis=-1), 1e-30) for x in (weight, stays))
    lacks = jnp.clip(jnp.log(mass / left), 0, most_mass)
    gram = q.T @ q
    ridge = stiffness * jnp.trace(gram) / q.shape[-1]
    moved = _solved(gram, ridge, q.T @ lacks)

    weight, stays = weight / mass[:, None], stays / left[:, None]
    missing = (weight - stays) @ old[1]
    gram = stays @ stays.T
    ridge = drawn_back * jnp.trace(gram) / q.shape[0]
    change = stays.T @ _solved(gram, ridge, missing)
    given = kept[:, None] & jnp.any(dropped)
    new = old[0] + moved, old[1] + change
    k = jnp.where(given, new[0].astype(k.dtype), k)
    return k, jnp.where(given, new[1].astype(v.dtype), v)


def _solved(
    gram: Float[Array, "n n"], ridge: Float[Array, ""], right: Float[Array, "n *m"]
) -> Float[Array, "n *m"]:
    """x of (gram + ridge · 1) x = right; gram is positive semidefinite."""
    # A head that weighs nothing at all: nothing to solve, and no 0 / 0.
    inverse = cholesky_inverted(gram + jnp.maximum(ridge, 1e-20) * jnp.eye(gram.shape[0]))
    return inverse.T @ (inverse @ right)
