"""Call C: the papers' throughput protocol, without compression and with it."""

import argparse
import time
from typing import Any

from benchmarks.card.parts import Group, Machine, Part
from benchmarks.card.trace import traced
from kvjax.cli.throughput import add_options

RATES = ("64", "v", "1", "8", "16")
"""In the order of what they tell."""
PROMPTS, LENGTH, ANSWER = 64, 6000, 500
TRACED = {False: (6, 48), True: (2, 4)}
"""Prompts and tokens of each answer that are traced, of the model and of a rehearsal's."""


class Quiet:
    """Progress that nobody watches."""

    def __call__(self, stage: str, done: int = 0, total: int = 0) -> None: ...

    def clear(self) -> None: ...


def groups(small: bool) -> tuple[Group, ...]:
    """The call's parts, in order."""
    rates = RATES[:2] if small else RATES
    return (
        Group("throughput", tuple(map(throughput_part, rates)), overlap=False),
        Group("trace", (trace_part(rates[0]),), overlap=False),
    )


def settings(small: bool) -> argparse.Namespace:
    """`kvjax throughput` as it is called: the pool of an L4 beside Llama-3.1-8B's weights."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    if small:
        sizes = "--input-len 96 --output-len 4 --num-prompts 2 --pool-tokens 512"
    else:
        sizes = f"--input-len {LENGTH} --output-len {ANSWER} --num-prompts {PROMPTS} --emulate l4"
    return parser.parse_args(f"--model llama3.1-8b --dummy-weights {sizes}".split())


def model_of(machine: Machine) -> Any:
    """Random weights of the true shapes; of a toy's in a rehearsal."""
    import jax

    from kvjax.models import ByteTokenizer, LoadedModel, ModelConfig, load_model
    from kvjax.models.decoder import init_params

    if not machine.small:
        return load_model("llama3.1-8b", dummy_weights=True, dtype="bfloat16")
    toy = ModelConfig(
        name="toy", vocab_size=256, hidden_size=32, intermediate_size=48, num_layers=2,
        num_heads=4, num_kv_heads=2, head_dim=8, max_position_embeddings=2048,
    )  # fmt: skip
    stacked = jax.default_backend() == "tpu"
    params = init_params(toy, "float32", stacked=stacked)
    return LoadedModel(toy, params, ByteTokenizer(), "dummy weights")


def kept_model(machine: Machine) -> Any:
    """One model for all parts of a process."""
    if "model" not in machine.kept:
        machine.kept["model"] = model_of(machine)
    return machine.kept["model"]


def trace_part(rate: str) -> Part:
    """Which kernels serve a few prompts, and how long none runs."""

    def run(machine: Machine, _: Any) -> dict[str, Any]:
        from kvjax.cli.throughput.measure import compression_of, engine_config
        from kvjax.cli.throughput.work import prompts_of, source_tokens
        from kvjax.engine import LLM, SamplingParams

        options, model = settings(machine.small), kept_model(machine)
        (length,), (most, answer) = options.input_len, TRACED[machine.small]
        compression = compression_of(rate, options.method)
        llm = LLM(model, compression, engine_config(options, length + options.output_len))
        llm.warm_up([length])
        prompts = prompts_of(source_tokens(model.tokenizer, None), [length] * most, 0)
        sampling = SamplingParams(max_tokens=answer, ignore_eos=True, detokenize=False)
        llm.generate(prompts, sampling)
        began = time.perf_counter()
        llm.generate(prompts, sampling)
        seconds = time.perf_counter() - began
        found = traced(lambda: [output.token_ids for output in llm.generate(prompts, sampling)])
        return {"prompts": most, "answer": answer, "seconds": seconds, "trace": found}

    return Part(f"trace: {named(rate)}", run, seconds=60, limit=200)


def named(rate: str) -> str:
    """A rate in a part's name."""
    return "no compression" if rate == "v" else f"rate {rate}"


def throughput_part(rate: str) -> Part:
    """One compression rate; "v" leaves compression out."""

    def run(machine: Machine, _: Any) -> dict[str, Any]:
        from kvjax.cli.throughput.measure import measure
        from kvjax.cli.throughput.work import Arrival, source_tokens

        options = settings(machine.small)
        model, (length,) = kept_model(machine), options.input_len
        peaks = machine.peaks()
        arrivals = [Arrival(0.0, length, options.output_len)] * options.num_prompts
        return measure(
            model, options, rate, [length] * options.num_prompts, arrivals,
            source_tokens(model.tokenizer, None), peaks, Quiet(),
        )  # fmt: skip

    # Few sequences fit the pool at a time where nothing is compressed.
    seconds = 100 if rate in ("v", "1") else 60
    return Part(f"throughput: {named(rate)}", run, seconds=seconds, limit=300)
