"""What an engine is built of: settings that are complete, a plan of the memory, a worker."""

import dataclasses
import os
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.cache import CacheSpec, Codec, CompressionConfig, Method, as_codec
from kvjax.cache.calibration import HEAD_LOAD, Calibration
from kvjax.cache.config import AUTO, UNCALIBRATED, as_method, usual_method
from kvjax.checks import shown
from kvjax.engine import processes
from kvjax.engine.calibrate.shelf import find as find_calibration
from kvjax.engine.calibrate.shelf import load as load_calibration
from kvjax.engine.config import EngineConfig
from kvjax.engine.draft import Draft
from kvjax.engine.key_similarity import measured
from kvjax.engine.memory import MemoryPlan, plan_memory
from kvjax.engine.parallel import Parallel, check_there
from kvjax.engine.probe import Bench, behind
from kvjax.engine.split import split_of
from kvjax.engine.tell import tell_of_codes
from kvjax.engine.worker import Worker
from kvjax.errors import UserError
from kvjax.models import LoadedModel, load_model
from kvjax.models.decoder import activation_dtype

if TYPE_CHECKING:
    from kvjax.engine.llm import LLM


@dataclasses.dataclass(frozen=True)
class Built:
    """The parts of an engine, and its settings with what follows from the model."""

    model: LoadedModel
    compression: CompressionConfig
    usual: str | Method
    """The method of requests that leave it open."""
    config: EngineConfig
    max_len: int
    plan: MemoryPlan
    worker: Worker
    calibration: Calibration | None
    draft: Draft | None


def build(
    model: LoadedModel | str,
    compression: CompressionConfig | None,
    config: EngineConfig | None,
    cache_dtype: Codec | jax.typing.DTypeLike | None,
    calibration: Calibration | str | os.PathLike[str] | None,
    draft: "LLM | None",
) -> Built:
    """Load what is named, plan the memory and make an empty cache; arguments and errors are those
    of `LLM`."""
    for what, given, kind in (
        ("model", model, (LoadedModel, str)),
        ("compression", compression, (CompressionConfig, type(None))),
        ("config", config, (EngineConfig, type(None))),
    ):
        if not isinstance(given, kind):
            name = kind[0].__name__
            raise UserError(f"{what} {shown(given)}: give a {name} ({what}=…)")
    compression = compression or CompressionConfig()
    config = config or EngineConfig()
    together = processes.current()
    if together is not None:
        check_there(config.tensor_parallel)
    if isinstance(model, str):
        devices, replicas = config.tensor_parallel, config.kv_replicas
        model = load_model(model, split=split_of(devices, calibration, replicas))
    max_len = config.max_len or model.config.max_position_embeddings
    named = [as_method(m) for m in (compression.method, *config.methods)]
    if calibration != AUTO or any(method.calibrated for method in named):
        found = load_calibration(calibration, model)
    else:
        found = find_calibration(model) if compression.method == AUTO else None
    compression = compression.chosen(usual_method(found.arrays if found else ()))
    own = compression.resolved
    usual = compression.method if own.compresses else UNCALIBRATED
    methods = [own, *named[1:]]
    planes = dict.fromkeys(plane for method in methods for plane in method.planes)
    codec = as_codec(cache_dtype, activation_dtype(model.params))
    spec = CacheSpec.of(model.config, codec, planes=tuple(planes))
    config = config.blocks_for(compression, spec.token_bytes)
    bench = Bench(model, config.prefill_chunk)
    drafting = None if draft is None else Draft(draft, model.tokenizer)
    load = None if found is None else found.arrays.get(HEAD_LOAD)
    split, params = model.split, model.params
    dealing = None if split is None else split.dealing
    parallel = Parallel.of(
        model.config, config.tensor_parallel, methods, load, dealing,
        config.kv_replicas,
    )  # fmt: skip
    if parallel is not None and split is None:
        params = parallel.split(params)
    plan = plan_memory(
        model if parallel is None else dataclasses.replace(model, params=params),
        config,
        max_len,
        cache_dtype,
        tuple(planes),
        behind(bench, methods),
        None if parallel is None else parallel.dealing,
        *(() if together is None else (together.least,)),
        *(() if drafting is None else (drafting.beside,)),
    )
    artefacts = {} if found is None else {n: jnp.asarray(x) for n, x in found.arrays.items()}
    worker = Worker(
        model.config,
        params,
        config,
        spec=plan.spec,
        num_blocks=plan.num_blocks,
        max_len=max_len,
        eos_ids=sorted(model.tokenizer.eos_ids),
        artefacts=artefacts | measured(model, methods, artefacts),
        parallel=parallel,
        bench=bench,
        draft=drafting,
    )
    compression = compression.in_tokens(plan.spec)
    tell_of_codes(worker.cache, model.config.group_size)
    return Built(model, compression, usual, config, max_len, plan, worker, found, drafting)
