"""How evenly the blocks of compressed prompts lie on several devices, before and after heads are
dealt by what a calibration says each keeps.

    python -m benchmarks.balance --data BOOK.txt.gz …         # SmolLM2, rate 8, 2 and 3 devices
    python -m benchmarks.balance --data essays.jsonl.gz --rates 4,8,16 --devices 2,3,4
    python -m benchmarks.balance --data essays.jsonl.gz --weights MODEL.gguf --calibration FILE

Prompts run on one device: what each head keeps is the same on several. Largest over mean is that
of the blocks of a device, for the mean of all texts and for the worst of them; what is saved is
saved against a pool in which every head has as many blocks as the fullest. No dealing is below
"least", for a head lies whole on one device. The last line is one JSON object.
"""

from kvjax.startup import guard

guard(__name__)

import argparse
import json
from pathlib import Path

from benchmarks.options import wholes
from kvjax.checks import check_whole
from kvjax.cli import ArgumentParser, run_script
from kvjax.errors import UserError

BLOCK = 16


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(prog="python -m benchmarks.balance", description=__doc__)
    add = parser.add_argument
    add("--data", type=Path, nargs="+", required=True, help="texts: .txt, .jsonl, .gz of these")
    add("--model", help="by name (smollm2-135m, or what --weights holds)")
    add("--weights", help="a folder, hub id, GGUF file or Orbax checkpoint (the model's own place)")
    add("--method", default="predicted-reads-blind", help="(%(default)s)")
    add("--rates", type=wholes, default=[8], help="(8)")
    add("--devices", type=wholes, default=[2, 3], help="(2,3)")
    add("--texts", type=int, default=8, help="from all of them, evenly (%(default)s)")
    add("--tokens", type=int, default=1024, help="of each (%(default)s)")
    add("--calibration", help="a file (the one that ships)")
    options = parser.parse_args(arguments)
    check_whole("--texts", options.texts, 1)
    check_whole("--tokens", options.tokens, 256)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    import numpy as np

    from kvjax import LLM, CompressionConfig, EngineConfig, SamplingParams
    from kvjax.cache.calibration import HEAD_LOAD
    from kvjax.engine.calibrate import shelf
    from kvjax.eval.files import read_texts
    from kvjax.models import load_model
    from kvjax.models.parallel import Dealing

    model = load_model(options.model, weights=options.weights)
    found = shelf.load(options.calibration or "auto", model)
    if found is None or HEAD_LOAD not in found.arrays:
        raise UserError(f"the calibration has no array {HEAD_LOAD}: calibrate the model again")
    load = np.asarray(found.arrays[HEAD_LOAD], np.float64)
    texts = [text for path in options.data for text in read_texts(path)]
    size = 8 * options.tokens
    pieces = [t[at : at + size] for t in texts for at in range(0, max(1, len(t) - size), size)]
    chosen = [pieces[i * len(pieces) // options.texts] for i in range(options.texts)]
    prompts = [np.asarray(model.tokenizer.encode(t)[: options.tokens], np.int32) for t in chosen]
    sizes = EngineConfig(
        max_batch=1,
        block_size=BLOCK,
        max_len=options.tokens + 1,
        prefill_chunk=options.tokens,
        prefill_scratch=options.tokens,
        pool_tokens=2 * options.tokens,
    )
    rows = []
    columns = ("mean", "worst", "least", "saved")
    print("rate  devices    dealt", *(f"{name:>7}" for name in columns))
    for rate in options.rates:
        settings = CompressionConfig(method=options.method, rate=rate, floor=16)
        llm = LLM(model, settings, sizes, calibration=found)
        outputs = llm.generate(prompts, SamplingParams(max_tokens=1))
        kept = np.stack([np.asarray(out.stats.kept) for out in outputs])
        blocks = -(-kept // BLOCK)
        padded = blocks.max((1, 2)) * blocks[0].size
        saved = 1 - blocks.sum() / padded.sum()
        for devices in options.devices:
            least = max(1, blocks.sum(0).max() * devices / blocks.sum())
            for name, dealing in (
                ("evenly", Dealing.even(len(load), load.shape[1], devices)),
                ("by load", Dealing.by_load(load, devices)),
            ):
                on = np.stack([dealing.loads(one) for one in blocks])
                mean = on.sum(0).max() / on.sum(0).mean()
                worst = (on.max(1) / on.mean(1)).max()
                print(
                    f"{rate:4}  {devices:7}  {name:>7}  {mean:6.3f}  {worst:6.3f}  {least:6.3f}  "
                    f"{saved:6.1%}",
                    flush=True,
                )
                rows.append([rate, devices, name, round(mean, 4), round(worst, 4)])
    print(json.dumps({"texts": len(prompts), "tokens": options.tokens, "rows": rows}))
    return 0


if __name__ == "__main__":
    run_script(main, lazy_imports=True)
