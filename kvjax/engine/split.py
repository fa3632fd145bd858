"""How a model's weights are to lie on several devices, said before they are read."""

import os
from collections.abc import Callable

from kvjax.cache.calibration import HEAD_LOAD, Calibration
from kvjax.engine.calibrate import shelf
from kvjax.engine.parallel import check_replicas, dealing_of, mesh_of
from kvjax.models import DUMMY, LoadedModel
from kvjax.models.parallel import Split


def split_of(
    devices: int,
    calibration: Calibration | str | os.PathLike[str] | None = shelf.AUTO,
    replicas: int = 1,
) -> Callable[[LoadedModel], Split | None]:
    """How a model's weights are to lie on so many devices, for `load_model` to deal as it reads.

    Heads are dealt by the load of the model's calibration, if it is there, and each to so many
    replicas.

    Raises `UserError` where the devices are no multiple of the replicas. What is returned raises it
    as `Parallel.of` does, or where there is no such file.
    """
    check_replicas(devices, replicas)

    def lies(model: LoadedModel) -> Split | None:
        if devices == 1:
            return None
        if model.source == DUMMY:
            found = None  # none is of random weights
        elif calibration == shelf.AUTO:
            found = shelf.find(model)
        else:
            found = shelf.load(calibration, model)
        load = None if found is None else found.arrays.get(HEAD_LOAD)
        dealing = dealing_of(model.config, devices, load, replicas)
        return Split(dealing, mesh_of(dealing))

    return lies
