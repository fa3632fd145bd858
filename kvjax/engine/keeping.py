"""Rows of the cache that hold prefixes for later requests: filled, restored and given back."""

from collections.abc import Hashable, Mapping, Sequence

import jax
import numpy as np

from kvjax.engine.config import EngineConfig
from kvjax.engine.prefixes import Prefix
from kvjax.engine.request import Request
from kvjax.engine.scheduler import Scheduler
from kvjax.engine.worker import Worker


class Keeper:
    """Carries out what is retained; which tokens lie where is in `scheduler.prefixes`."""

    def __init__(self, config: EngineConfig, worker: Worker, scheduler: Scheduler):
        self._config, self._worker, self._scheduler = config, worker, scheduler

    def retain_ended(self, slots: Sequence[int]) -> None:
        """Retain what sequences hold that have come to their ends, for their next turns."""
        ended = [
            r
            for r in self._scheduler.running
            if r.slot in slots
            and r.sharing is not None
            and r.finish_reason in ("eos", "stop", "length")
        ]
        if not ended:
            return
        # The last token has no KVs; behind a stop text there may be KVs of unknown tokens.
        sizes = np.array(self._worker.cache.seq_len)
        for request in ended:
            size = int(sizes[request.slot])
            prefixes = self._scheduler.prefixes
            begun = prefixes.find(request.sharing, request.prompt)
            if begun is not None and not begun.ended:
                # Of use until now: it outlives the ends of those that began with it.
                prefixes.used(begun)
            if self._config.share_grain <= size <= request.length and request.slot is not None:
                self.hold(request, request.all_tokens[:size], request.slot, None, ended=True)

    def hold(
        self,
        request: Request,
        tokens: np.ndarray,
        slot: int,
        logits: jax.Array | None,
        ended: bool = False,
    ) -> None:
        """Let a row of its own hold what a slot holds, for those that begin with the same."""
        prefixes = self._scheduler.prefixes
        settings = request.sharing
        if settings is None:
            return
        if (known := prefixes.exactly(settings, tokens)) is not None:
            if logits is None or known.logits is not None:
                return
            self.forget(known)
        if prefixes.full and (oldest := prefixes.oldest()) is not None:
            self.forget(oldest)
        if not prefixes.full:
            self._worker.share(slot, prefixes.add(tokens, settings, logits, ended).row)

    def load(
        self,
        tokens: np.ndarray,
        settings: Hashable,
        logits: jax.Array | None,
        held: Mapping[str, np.ndarray],
    ) -> bool:
        """Retain a prefix that was saved. Returns whether there was room, others given up; where
        there is none even so, none is."""
        prefixes = self._scheduler.prefixes
        if (known := prefixes.exactly(settings, tokens)) is not None:
            prefixes.used(known)
            return True
        blocks = len(held["metric"])
        if blocks > self._room():
            return False
        while prefixes.full or self._worker.free_blocks().sum() < blocks:
            if (oldest := prefixes.oldest()) is None:
                return False
            self.forget(oldest)
        prefix = prefixes.add(tokens, settings, logits)
        if not self._worker.restore(prefix.row, held):
            prefixes.remove(prefix)
            return False
        self._scheduler.accounts.free[:] = self._worker.free_blocks()
        return True

    def _room(self) -> int:
        """Blocks that are free, or of prefixes alone."""
        n, first = self._worker.cache.num_blocks, self._config.max_batch
        table = np.asarray(self._worker.on_host(self._worker.cache.block_table))
        running, retained = (np.unique(rows[rows < n]) for rows in (table[:first], table[first:]))
        given_up = np.setdiff1d(retained, running, assume_unique=True)
        return int(self._worker.free_blocks().sum()) + len(given_up)

    def forget(self, prefix: Prefix) -> None:
        """Give back the row of a prefix."""
        self._worker.empty([prefix.row])
        self._scheduler.note_forgotten(prefix, self._worker.free_blocks())

    def forget_all(self) -> None:
        """Give back the rows of all prefixes."""
        for prefix in list(self._scheduler.prefixes):
            self.forget(prefix)
