"""Attention matching: KVs that stay, fitted to attention as it was before others went."""

from jaxtyping import Array, Bool, Float

from kvjax.kernels.checks import wanted
from kvjax.kernels.choice import Choice, choose
from kvjax.kernels.device import check_numba
from kvjax.kernels.match_attention import reference


def match_attention(
    q: Float[Array, "H Q d"],
    k: Float[Array, "H T d"],
    v: Float[Array, "H T d"],
    dropped: Bool[Array, "H T"],
    kept: Bool[Array, "H T"],
    *,
    most_mass: float,
    stiffness: float,
    drawn_back: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "H T d"], Float[Array, "H T d"]]:
    """Keys and values of heads after those that stay were fitted, head by head.

    After Zweiger, Guo, Fu and Kim (Fast KV Compaction via Attention Matching, arXiv 2602.16284,
    2026), but with one vector that is added to all keys of a head in place of a bias for each: the
    ridge regression, on the query, of the logarithm of the mass that it lacks. New values are the
    ridge regression of what its output lacks then, drawn to what they were. All in float32.

    Args:
        q: reference queries, float32, rotated and scaled by 1/√d.
        k: keys, rotated.
        v: values.
        dropped: KVs that go. Where a head has none, all of it stays as it is.
        kept: KVs that stay; what is neither may be anything, and is not read.
        most_mass: most that a query may lack, in logarithmic units.
        stiffness: ridge of the keys' vector, times the mean square of a query's entry.
        drawn_back: ridge of the values' change, times the mean Σ of a query's squared weights.
        implementation: "numba" (CPUs) or "xla"; None picks by device (`kvjax.kernels.explain` says
            which and why).

    Returns:
        Keys and values in their dtypes; of what is not kept they are as they were.

    Raises:
        ValueError: an argument does not fit, or the implementation asked for is unknown or does not
            serve the call; names the argument, what it got and what is wanted.
    """
    chosen = choice(q, k, v, dropped, kept, implementation=implementation)
    match = reference.match_attention
    if chosen.name == "numba":
        from kvjax.kernels.match_attention import numba_cpu

        match = numba_cpu.match_attention
    return match(q, k, v, dropped, kept, most_mass, stiffness, drawn_back)


def choice(q, k, v, dropped, kept, *, implementation: str | None = None, **_) -> Choice:
    """The implementation of a call of `match_attention`."""
    if k.ndim != 3 or 0 in k.shape:
        raise wanted("k shape", list(k.shape), "[H, T, d]")
    num_heads, num_tokens, d = k.shape
    if q.ndim != 3 or q.shape[::2] != (num_heads, d) or 0 in q.shape:
        raise wanted("q shape", list(q.shape), f"[{num_heads}, Q, {d}]")
    if v.shape != k.shape:
        raise wanted("v shape", list(v.shape), f"that of k, {list(k.shape)}")
    for name, mask in (("dropped", dropped), ("kept", kept)):
        if mask.shape != k.shape[:2]:
            raise wanted(f"{name} shape", list(mask.shape), [num_heads, num_tokens])

    return choose(implementation, {"numba": check_numba, "xla": lambda _: None}, q)


match_attention.choice = choice  # type: ignore[attr-defined]
