"""What users hand in as prompts: texts or token ids, one or several."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.checks import check_text, shown
from kvjax.errors import UserError
from kvjax.models.tokenizer import Tokenizer

Prompt = str | Sequence[int] | np.ndarray


def as_batch(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A batch of prompts, or one prompt as a batch.

    Raises:
        UserError: it is neither.
    """
    if isinstance(prompts, bytes | bytearray | dict | set) or not hasattr(prompts, "__len__"):
        raise UserError(f"prompts {shown(prompts)}: give texts or lists of token ids")
    alone = isinstance(prompts, str) or (
        len(prompts) > 0 and isinstance(prompts[0], int | np.integer)
    )
    return [prompts] if alone else prompts  # type: ignore[list-item,return-value]


def token_ids(prompt: Any, tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    """A prompt's token ids [T], int32.

    Raises:
        UserError: it is no prompt, is empty, or has an id that the model does not know.
    """
    if isinstance(prompt, str):
        check_text("prompt", prompt, "a text that UTF-8 can encode")
        prompt = tokenizer.encode(prompt, add_bos=tokenizer.adds_bos)
    try:
        tokens = np.asarray(prompt)
    except Exception:
        tokens = np.zeros((1, 1))
    if tokens.size == 0:
        raise UserError("the prompt is empty: give at least one token")
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        wrong = _beyond_arrays(prompt, vocab_size)
        if wrong is None:
            kind = f" of {tokens.dtype.name}" if tokens.ndim == 1 else ""
            raise UserError(
                f"the prompt is {type(prompt).__name__}{kind}: give a text or token ids"
            )
    else:
        wrong = next(iter(tokens[(tokens < 0) | (tokens >= vocab_size)].tolist()), None)
    if wrong is not None:
        raise UserError(
            f"token id {shown(wrong)} of the prompt: give ids from 0 to {vocab_size - 1}"
        )
    return tokens.astype(np.int32)


def _beyond_arrays(prompt: Any, vocab_size: int) -> int | None:
    """The first wrong id of whole numbers that no array of them holds, None for anything else."""
    if not isinstance(prompt, list | tuple) or any(type(token) is not int for token in prompt):
        return None
    return next((token for token in prompt if not 0 <= token < vocab_size), None)
