"""The first stage: a prompt runs through the model, and its KVs are scored.

Pure functions; `config` and `observer` are static. A prompt runs whole, or in chunks behind what is
there of it already: in a contiguous scratch, or in the pool. All three are `_run` over what a layer
has before it.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from kvjax.cache import PagedCache, write_prompt
from kvjax.cache.policy import LayerView, Observer, Scores
from kvjax.cache.store import unshare
from kvjax.engine.compilation import sizes_upto
from kvjax.kernels import (
    Prefix,
    prefill_attention,
    prefill_attention_with_log_sum,
    prefill_attention_with_received,
)
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import activation_dtype, forward, logits
from kvjax.models.parallel import own_share


@no_type_check  # JAX rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptKV:
    """Keys, values and scores of a prompt in a contiguous scratch, before they are written."""

    k: Float[Array, "L T H d"]
    v: Float[Array, "L T H d"]
    scores: Scores
    length: Int32[Array, ""]
    token: Int32[Array, "L T"] | None = None
    """Where layers lack tokens, which token each of a layer's rows is of, ascending; by default
    row i is token i."""
    rows: Int32[Array, " L"] | None = None
    """How many rows each layer has then, in place of `length`."""

    @property
    def all_rows(self) -> dict[str, Array]:
        """What `write_prompt` needs beside keys, values and scores, if layers lack tokens."""
        if self.token is None or self.rows is None:
            return {}
        shape = self.scores.metric.shape
        index = jnp.arange(shape[2], dtype=jnp.int32)
        return {
            "kept_index": jnp.broadcast_to(index, shape),
            "kept_len": jnp.broadcast_to(self.rows[:, None], shape[:2]),
            "token": self.token,
        }


LEAST_READ = 256
"""KVs of a head that are read of a pool at least, whether there are so many or not."""
READ_FACTOR = 4
"""Between the numbers of KVs that may be read: few, as what reads them is compiled for each."""


@dataclasses.dataclass(frozen=True)
class _InScratch:
    """What a scratch holds before a chunk."""

    prompt: PromptKV

    @property
    def size(self) -> int:
        """KVs that a head can hold at most."""
        return self.prompt.k.shape[1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many of these a layer may be read with."""
        return (self.size,)

    @property
    def dtype(self) -> Any:
        return self.prompt.k.dtype

    def fitting(self, layer: Int32[Array, ""]) -> Int32[Array, ""]:
        """The index of the size that holds all of a layer's KVs."""
        return jnp.int32(0)

    def prefix(self, layer: Int32[Array, ""], size: int) -> Prefix:
        k, v = self.prompt.k[layer], self.prompt.v[layer]
        length = jnp.broadcast_to(self.prompt.length, k.shape[1])
        return Prefix(jnp.swapaxes(k, 0, 1), jnp.swapaxes(v, 0, 1), length)

    def position(self, layer: Int32[Array, ""], size: int) -> Int32[Array, "H P"]:
        """Token position of each of so many KVs; −1 where nothing is held."""
        token = jnp.arange(size, dtype=jnp.int32)
        held = jnp.where(token < self.prompt.length, token, -1)
        return jnp.broadcast_to(held, (self.prompt.k.shape[2], size))


@dataclasses.dataclass(frozen=True)
class _InPool:
    """What a slot holds before a chunk."""

    cache: PagedCache
    slot: Int32[Array, ""]

    @property
    def size(self) -> int:
        return self.cache.max_blocks * self.cache.block_size

    @property
    def sizes(self) -> tuple[int, ...]:
        b = self.cache.block_size
        widths = sizes_upto(self.cache.max_blocks, max(1, LEAST_READ // b), READ_FACTOR)
        return tuple(width * b for width in widths)

    @property
    def dtype(self) -> Any:
        return self.cache.kv.operands[0].dtype

    def fitting(self, layer: Int32[Array, ""]) -> Int32[Array, ""]:
        cache = self.cache
        # Of devices with heads of their own all have to choose the same one.
        held = (
            cache.context_len[self.slot, layer] if cache.shard is None else cache.seq_len[self.slot]
        )
        return jnp.searchsorted(jnp.asarray(self.sizes), jnp.max(held)).astype(jnp.int32)

    def _page(self, layer: Int32[Array, ""], size: int) -> Int32[Array, "H M"]:
        table = self.cache.block_table[self.slot, layer, :, : size // self.cache.block_size]
        return jnp.minimum(table, self.cache.num_blocks - 1)

    def prefix(self, layer: Int32[Array, ""], size: int) -> Prefix:
        page, cache = self._page(layer, size), self.cache
        rows = (cache.num_kv_heads, size, -1)
        length = cache.context_len[self.slot, layer]
        k, v = (pool[page].reshape(rows) for pool in cache.kv.operands)
        if cache.window is not None:
            k, v = cache.window.over(self.slot, layer, k, v)
        return Prefix(cache.read_keys(layer, k), v, length)

    def position(self, layer: Int32[Array, ""], size: int) -> Int32[Array, "H P"]:
        position = self.cache.position[self._page(layer, size)].reshape(-1, size)
        length = self.cache.context_len[self.slot, layer]
        return jnp.where(jnp.arange(size) < length[:, None], position, -1)


Before = _InScratch | _InPool


def prefill(
    config: ModelConfig,
    observer: Observer,
    params: nnx.State,
    artefacts: Mapping[str, Array],
    tokens: Int32[Array, " T"],
    length: Int32[Array, ""],
) -> tuple[PromptKV, Float[Array, " V"]]:
    """Run a whole prompt.

    Args:
        config: the model (static).
        observer: how KVs are scored (static).
        params: the model's parameters.
        artefacts: calibrated arrays by name.
        tokens: token ids; those from `length` on are padding.
        length: tokens of the prompt.

    Returns:
        What there is to cache, and the logits of the next token.
    """
    start = jnp.int32(0)
    k, v, scores, out = _run(config, observer, params, artefacts, tokens, start, length, None)
    return PromptKV(k, v, observer.finish(scores, None, length, tokens.shape[0]), length), out


def prefill_in_scratch(
    config: ModelConfig,
    observer: Observer,
    params: nnx.State,
    artefacts: Mapping[str, Array],
    prompt: PromptKV,
    tokens: Int32[Array, " C"],
    length: Int32[Array, ""],
    last: Bool[Array, ""] | None = None,
) -> tuple[PromptKV, Float[Array, " V"]]:
    """Run the next chunk of a prompt that stands in a contiguous scratch.

    Chunks give the same KVs and scores as the whole prompt at once, while other sequences can be
    decoded in between.

    Args:
        config: the model (static).
        observer: how KVs are scored (static). Windows and sampled queries are the last chunk's.
        params: the model's parameters.
        artefacts: calibrated arrays by name.
        prompt: the chunks so far (donate it), with room for C more tokens.
        tokens: token ids; those from `length` on are padding.
        length: tokens of this chunk.
        last: whether no chunk comes behind it; None for yes. Where each chunk would measure all KVs
            anew, only the last one does, and the scores mean nothing before.

    Returns:
        The prompt with this chunk, and the logits of the token after it.
    """
    start, before = prompt.length, _InScratch(prompt)
    room = before.size
    carry = None if observer.scorer is None else observer.scorer.carry(length)
    k, v, scores, out = _run(
        config, observer, params, artefacts, tokens, start, length, before,
        last if carry is None else None,
    )  # fmt: skip
    end = start + length
    scores = _finished(observer, scores, before, config, tokens, start, length, room + len(tokens))
    held = jnp.arange(room) < start

    def joined(new, old, axis, keep=None):
        """What was held, measured anew, and the chunk behind it."""
        first = lax.slice_in_dim(new, 0, room, axis=axis)
        shape = (1,) * axis + (room,) + (1,) * (new.ndim - axis - 1)
        first = jnp.where(held.reshape(shape), first, 0)
        if keep is not None:
            first = first + old * keep
        behind = lax.slice_in_dim(new, room, new.shape[axis], axis=axis)
        return lax.dynamic_update_slice_in_dim(first, behind, start, axis=axis)

    scores = Scores(
        joined(scores.metric, prompt.scores.metric, 2, carry),
        state={name: joined(new, None, 2) for name, new in scores.state.items()},
        queries=scores.queries,
    )
    return PromptKV(
        lax.dynamic_update_slice_in_dim(prompt.k, k.astype(prompt.k.dtype), start, axis=1),
        lax.dynamic_update_slice_in_dim(prompt.v, v.astype(prompt.v.dtype), start, axis=1),
        scores,
        end,
    ), out


def chunk_scores(
    config: ModelConfig,
    observer: Observer,
    params: nnx.State,
    artefacts: Mapping[str, Array],
    prompt: PromptKV,
    tokens: Int32[Array, " C"],
    length: Int32[Array, ""],
) -> Scores:
    """What a chunk behind a prompt makes of all KVs, the prompt's first; nothing is kept of it.

    Arguments as of `prefill_in_scratch`; the scores have T + C columns.
    """
    before = _InScratch(prompt)
    return _run(config, observer, params, artefacts, tokens, prompt.length, length, before)[2]


def empty_prompt(config: ModelConfig, observer: Observer, room: int, dtype: Any) -> PromptKV:
    """A scratch for a prompt of at most `room` tokens, with none of them in it."""
    heads = (config.num_layers, config.num_kv_heads)
    kv = (config.num_layers, room, config.num_kv_heads, config.head_dim)
    state = {
        plane.name: jnp.zeros((*heads, room, plane.width), plane.dtype) for plane in observer.planes
    }
    metric, queries = jnp.zeros((*heads, room), jnp.float32), None
    if (sample := observer.queries) is not None:
        rows = (config.num_layers, config.num_heads, sample.newest + sample.spread)
        queries = jnp.zeros((*rows, config.head_dim), dtype)
    scores = Scores(metric, state=state, queries=queries)
    return PromptKV(jnp.zeros(kv, dtype), jnp.zeros(kv, dtype), scores, jnp.int32(0))


def prefill_in_pool(
    config: ModelConfig,
    observer: Observer,
    params: nnx.State,
    artefacts: Mapping[str, Array],
    cache: PagedCache,
    slot: Int32[Array, ""],
    tokens: Int32[Array, " T"],
    length: Int32[Array, ""],
) -> tuple[PagedCache, Float[Array, " V"], Bool[Array, ""], Float[Array, "L Hr n d"] | None]:
    """Run the next chunk of a prompt behind what its slot holds, and write it.

    The chunk attends to the KVs that the slot's heads still hold and to itself. All of these are
    scored again: a windowed metric is that of the last queries so far, one over all queries grows.
    Compress the slot between chunks. Blocks whose KVs are scored again are the slot's own
    afterwards.

    Returns:
        The cache, the logits of the token after the chunk, ``ok``: False, and every slot holding
        what it held, when the blocks do not suffice; and the chunk's queries that the observer
        wants.
    """
    scorer = None if observer.scorer is None or observer.scorer.settled else observer.scorer
    start, before = cache.seq_len[slot], _InPool(cache, slot)
    held = before.size
    k, v, scores, out = _run(config, observer, params, artefacts, tokens, start, length, before)
    # All of it is read before any of it is written: else it would be copied.
    cache, k = lax.optimization_barrier((cache, k))
    longest = config.max_position_embeddings
    scores = _finished(observer, scores, before, config, tokens, start, length, longest)
    held_len = cache.context_len[slot]
    behind = {name: x[..., held:, :] for name, x in scores.state.items()}
    if scorer is not None and cache.shared is not None:
        table = cache.block_table[slot]
        cache, table, copied = unshare(cache, table, jnp.ones_like(table, bool))
        cache = dataclasses.replace(cache, block_table=cache.block_table.at[slot].set(table))
        length = jnp.where(copied, length, -1)
    cache, ok = write_prompt(cache, slot, k, v, scores.metric[..., held:], length, state=behind)
    if scorer is not None:
        held_len = jnp.where(ok, held_len, 0)
        first = Scores(
            scores.metric[..., :held],
            state={name: x[..., :held, :] for name, x in scores.state.items()},
        )
        cache = _scored_again(cache, slot, held_len, first, scorer.carry(length))
    return cache, out, ok, scores.queries


def _run(
    config: ModelConfig,
    observer: Observer,
    params: nnx.State,
    artefacts: Mapping[str, Array],
    tokens: Int32[Array, " T"],
    start: Int32[Array, ""],
    length: Int32[Array, ""],
    before: Before | None,
    observed: Bool[Array, ""] | None = None,
) -> tuple[Float[Array, "L T H d"], Float[Array, "L T H d"], Scores, Float[Array, " V"]]:
    """Keys, values and scores (of what is before, too) of a chunk; logits of the next token.

    Scores are zeros where `observed` says so.
    """
    num_tokens = tokens.shape[0]
    positions = start + jnp.arange(num_tokens, dtype=jnp.int32)

    def attend(scratch, layer, q, k, v, hidden):
        q, k, v = q[0], k[0], v[0]
        own = own_share(config, q)

        def attend_and_score(size=0):
            prefix = None if before is None else before.prefix(layer, size)
            view = LayerView(layer, q, k, length, start, v=v, hidden=hidden[0])
            observation = observer.observation
            if observation is not None and prefix is None:
                out, log_sum, received = prefill_attention_with_received(
                    q, k, v,
                    query_weight=observation.query_weight(length, num_tokens),
                    power=observation.power,
                    excluded_distance=observation.excluded_distance,
                )  # fmt: skip
                out = own_share(config, out)
                told = {"log_sum": log_sum, "received": received, "observation": observation}
                view = dataclasses.replace(view, **told)
            elif observer.needs_log_sum:
                out, log_sum = prefill_attention_with_log_sum(q, k, v, prefix=prefix)
                out = own_share(config, out)
                view = dataclasses.replace(view, log_sum=log_sum)
            else:
                out = prefill_attention(own, k, v, prefix=prefix)
            if prefix is not None:
                assert before is not None
                view = behind_prefix(view, prefix, before.position(layer, size))

            def observe():
                scores = observer.observe(view, artefacts)
                return scores if before is None else scores.spread(size, before.size)

            if observed is None:
                return out, observe()
            return out, lax.cond(observed, observe, no_scores)

        def no_scores():
            return jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), scratch[2])

        def neither():
            return jnp.zeros(own.shape, v.dtype), no_scores()

        if before is None:
            out, scores = attend_and_score()
        else:
            # Never the last one. As a branch it is one unit that ends before the next layer begins:
            # unrolled layers would else hold what each of them gathered to the end, and the pool
            # would be copied because a read of it might come after it is written.
            sizes = before.sizes
            branches = [functools.partial(attend_and_score, size) for size in sizes]
            which = jnp.where(length > 0, before.fitting(layer), len(sizes))
            out, scores = lax.switch(which, [*branches, neither])
        scratch = jax.tree.map(
            lambda whole, part: whole.at[layer].set(part), scratch, (k, v, scores)
        )
        return scratch, out[None], None

    scratch = _scratch(config, observer, params, artefacts, num_tokens, before)
    hidden, (k, v, scores), _ = forward(
        config, params, tokens[None], positions[None], attend, scratch
    )
    last = lax.dynamic_index_in_dim(hidden[0], length - 1, keepdims=False)
    return k, v, scores, logits(config, params, last)


def behind_prefix(view: LayerView, prefix: Prefix, held: Int32[Array, "H P"]) -> LayerView:
    """The view of a chunk with what is before it in front, `held` the token position of each; −1
    where nothing is held."""
    token = jnp.arange(view.k.shape[0], dtype=jnp.int32)
    new = jnp.where(token < view.length, view.start + token, -1)
    new = jnp.broadcast_to(new, (held.shape[0], view.k.shape[0]))

    def joined(first, behind):
        first = jnp.swapaxes(jnp.where((held >= 0)[..., None], first, 0), 0, 1)
        return jnp.concatenate([first, behind.astype(first.dtype)])

    return dataclasses.replace(
        view,
        k=joined(prefix.k, view.k),
        v=joined(prefix.v, view.v),
        position=jnp.concatenate([held, new], axis=1),
    )


def _scratch(
    config: ModelConfig,
    observer: Observer,
    params: nnx.State,
    artefacts: Mapping[str, Array],
    num_tokens: int,
    before: Before | None,
) -> tuple[Array, Array, Scores]:
    """Room for the keys, values and scores of all layers, filled layer by layer in place."""
    dtype = activation_dtype(params)
    heads, d = config.num_kv_heads, config.head_dim
    kv = jnp.zeros((config.num_layers, num_tokens, heads, d), dtype)
    held = 0 if before is None else before.size

    def abstract(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    keys = abstract(held + num_tokens, heads, d, dtype=before.dtype if before else dtype)
    q = abstract(num_tokens, config.num_heads, d, dtype=dtype)
    hidden = abstract(num_tokens, config.hidden_size, dtype=dtype)
    view = LayerView(abstract(), q, keys, abstract(), abstract(), v=keys, hidden=hidden)
    if observer.needs_log_sum:
        log_sum = abstract(config.num_heads, num_tokens, dtype=jnp.float32)
        view = dataclasses.replace(view, log_sum=log_sum)
    if before is not None:
        view = dataclasses.replace(view, position=abstract(heads, held + num_tokens))
    return kv, kv, observer.room(view, artefacts, config.num_layers)


def _finished(
    observer: Observer,
    scores: Scores,
    before: Before,
    config: ModelConfig,
    tokens: Int32[Array, " T"],
    start: Int32[Array, ""],
    length: Int32[Array, ""],
    num_positions: int,
) -> Scores:
    """The scores once all layers are through."""
    position = None
    if observer.scorer is not None and observer.scorer.joins_layers:
        token = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        new = jnp.where(token < length, start + token, -1)
        heads = (config.num_layers, config.num_kv_heads, tokens.shape[0])
        whole = functools.partial(before.position, size=before.size)
        held = jax.vmap(whole)(jnp.arange(config.num_layers, dtype=jnp.int32))
        position = jnp.concatenate([held, jnp.broadcast_to(new, heads)], axis=-1)
    return observer.finish(scores, position, start + length, num_positions)


def _scored_again(
    cache: PagedCache,
    slot: Int32[Array, ""],
    held_len: Int32[Array, "L H"],
    scores: Scores,
    carry: Float[Array, ""] | None,
) -> PagedCache:
    """The cache with the numbers of a slot's first `held_len` KVs replaced.

    With `carry`, that times the old metric is added.
    """
    table = cache.block_table[slot]
    held = jnp.arange(scores.metric.shape[-1]) < held_len[..., None]
    held = held.reshape(*table.shape, -1)

    def replaced(pool, new, keep=None):
        old = pool.at[table].get(mode="fill", fill_value=0)
        new = new.reshape(old.shape)
        if keep is not None:
            new = new + old * keep
        mask = held.reshape(*held.shape, *(1,) * (old.ndim - held.ndim))
        return pool.at[table].set(jnp.where(mask, new, old), mode="drop")

    state = {
        name: replaced(plane, scores.state[name]) if name in scores.state else plane
        for name, plane in cache.state.items()
    }
    return dataclasses.replace(
        cache, metric=replaced(cache.metric, scores.metric, carry), state=state
    )
