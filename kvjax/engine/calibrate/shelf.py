"""Where calibrations are: with this package, in the user's cache, or made at first use."""

import os
from importlib import resources
from pathlib import Path

import jax

from kvjax.cache.calibration import Calibration
from kvjax.engine.calibrate.published import is_published, load_published
from kvjax.engine.calibrate.run import CalibrationSettings, Progress, calibrate
from kvjax.engine.calibrate.texts import QUICK, QUICK_EXERCISES, default_texts
from kvjax.errors import UserError
from kvjax.models import DUMMY, LoadedModel
from kvjax.models.hub import user_cache_dir

AUTO, NONE = "auto", "none"


def shipped() -> list[Path]:
    """The calibrations that come with this package."""
    folder = Path(str(resources.files("kvjax.engine.calibrate"))) / "shipped"
    return sorted(folder.glob("*.safetensors"))


def shelved(own_hash: str) -> Path:
    """Where a calibration of a model is kept once it was made."""
    return user_cache_dir() / "calibrations" / f"{own_hash}.safetensors"


def find(model: LoadedModel) -> Calibration | None:
    """The calibration of a model that is there already.

    Weights are looked at only where there is one of a model with as many layers, or a shelf.
    """
    if model.source == DUMMY and model.split is not None:
        # None is of random weights, and these do not lie where their fingerprint can be taken.
        return None
    for path in shipped():
        found = _of_model(path, model)
        if found is not None:
            return found
    if not any(shelved("*").parent.glob("*.safetensors")):
        return None
    path = shelved(model.fingerprint)
    return _of_model(path, model) if path.is_file() else None


def _of_model(path: Path, model: LoadedModel) -> Calibration | None:
    """The calibration of a file, if it is of a model."""
    try:
        found = Calibration.load(path)
        if any(len(array) != model.config.num_layers for array in found.arrays.values()):
            return None
        return found if found.model_hash == model.fingerprint else None
    except UserError:
        # A damaged file of the cache is made anew.
        return None


def make(model: LoadedModel, progress: Progress = lambda what, done, total: None) -> Calibration:
    """Calibrate a model on texts of this package, and keep it in the user's cache.

    Raises:
        UserError: as `calibrate` says; this is one of several processes.
    """
    if jax.process_count() > 1:
        raise UserError(
            f"{model.config.name} has no calibration, and several processes make none: run `kvjax "
            "calibrate` once, on one machine, and give its file; or give another method"
        )
    settings = CalibrationSettings(
        tokens=min(600, model.config.max_position_embeddings // 3),
        # Minutes on a CPU, seconds elsewhere.
        exercises=0 if jax.default_backend() == "cpu" else QUICK_EXERCISES,
    )
    fit = calibrate(model, default_texts(QUICK), settings, progress=progress)
    path = shelved(fit.calibration.model_hash)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fit.calibration.save(path)
    except (OSError, UserError):
        # It is made again next time: slower, and nothing worse.
        pass
    return fit.calibration


def load(
    choice: str | os.PathLike[str] | Calibration | None,
    model: LoadedModel,
    progress: Progress = lambda what, done, total: None,
) -> Calibration | None:
    """The calibration that a choice names: `auto`, `none`, a file, a published one, or itself.

    Raises:
        UserError: there is no such file, or it is of another model.
    """
    if choice is None or choice == NONE:
        return None
    if choice == AUTO:
        return find(model) or make(model, progress)
    if isinstance(choice, Calibration):
        found = choice
    else:
        path = Path(choice)
        found = load_published(path, model) if is_published(path) else Calibration.load(path)
    found.check(model.fingerprint, model.config.num_layers)
    return found
