"""The kvpress half of `python -m benchmarks.kvpress`; runs in a Python with torch and kvpress.

    python benchmarks/kvpress/peer.py --versions
    python benchmarks/kvpress/peer.py MODEL_FOLDER < jobs.jsonl

A job is a JSON line: token ids of a prompt, how many of them are compressed, how many of those open
the chat template before the text, the target's token ids, and presses with the KVs that each may
keep. The answer is a JSON line: scores of the full cache and of every press, and the tokens of a
greedy answer of at most `free_tokens` from token `opened` on, if that is not compressed yet.
`logits_to` names a file for the full cache's logits after the prompt; `encode` asks for the token
ids of a text.

One prefill serves the full cache and all presses: a press changes the cache and not what a layer
gives, so each has a cache of its own and its hook runs on every layer's KVs in turn. Presses that
need the attention itself share a second prefill. KVzip runs as it is, but scores a prompt once for
all ratios.
"""

# pyright: reportAttributeAccessIssue=false
# It takes this folder for the package of the same name.

import contextlib
import json
import os
import sys
import time

import kvpress  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]


def make_press(name, share, length):
    """The press of that name, to keep this share of the KVs of a prompt.

    Most presses keep int(length · (1 − ratio)) KVs per head: the ratio says a whole number of KVs,
    and a thousandth more, so that rounding does not lose one.
    """
    kept = max(1, round(share * length))
    ratio = max(0.0, 1 - (kept + 1e-3) / length)
    exact = max(0.0, 1 - share)
    makers = {
        "snapkv": lambda: kvpress.SnapKVPress(ratio),
        "pyramidkv": lambda: kvpress.PyramidKVPress(exact),
        "adakv-snapkv": lambda: kvpress.AdaKVPress(kvpress.SnapKVPress(ratio)),
        "expected-attention": lambda: kvpress.ExpectedAttentionPress(ratio),
        "keydiff": lambda: kvpress.KeyDiffPress(ratio),
        "compactor": lambda: kvpress.CompactorPress(ratio),
        "streaming-llm": lambda: kvpress.StreamingLLMPress(ratio),
        "tova": lambda: kvpress.TOVAPress(ratio),
        "observed-attention": lambda: kvpress.ObservedAttentionPress(ratio),
        "kvzip": lambda: kvpress.KVzipPress(exact),
    }
    return makers[name]()


REFUSED = (AssertionError, ValueError)
"""What presses raise for prompts that do not suit them."""


class Run:
    """A press with a cache of its own, which follows a prefill layer by layer.

    `cache` is what it leaves; `masked` the KVs of each layer that it hides instead of removing,
    in kvpress's own form; `layers` the positions it keeps of each layer, if those are wanted.
    """

    def __init__(self, press, wants_positions=False):
        self.press = press
        self.cache = transformers.DynamicCache()
        self.masked = []
        self.layers = []
        self.seconds = 0.0
        if wants_positions:
            score, prune = press.score, press.compress
            # Of a layer that loses nothing no scores are asked for.
            scores = []

            def note(*given):
                scores[:] = [score(*given)]
                return scores[0]

            def compress(module, hidden_states, keys, *given):
                scores[:] = [torch.zeros(keys.shape[:3])]
                kept, values = prune(module, hidden_states, keys, *given)
                # What is left does not say which tokens it is of: chosen as the press chooses.
                self.layers.append(scores[0].topk(kept.shape[2], dim=-1).indices[0].tolist())
                return kept, values

            press.score, press.compress = note, compress

    def take(self, module, args, kwargs, output, keys, values):
        """Compress one layer's KVs, as in a prefill of its own."""
        start = time.perf_counter()
        module.masked_key_indices = None
        self.cache.update(keys, values, module.layer_idx)
        self.press.forward_hook(module, args, {**kwargs, "past_key_values": self.cache}, output)
        self.masked.append(module.masked_key_indices)
        module.masked_key_indices = None
        self.seconds += time.perf_counter() - start

    def found(self):
        """What is left, in numbers."""
        layers = self.cache.layers
        hidden = sum(0 if masked is None else len(masked[2]) for masked in self.masked)
        found = {
            "kvs": sum(layer.keys.shape[1] * layer.keys.shape[2] for layer in layers) - hidden,
            "bytes": sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in layers),
            "ratio": float(self.press.compression_ratio),
            "simulated": hidden > 0,
            "compress_seconds": self.seconds,
        }
        return {**found, "positions": self.layers} if self.layers else found


class Peer:
    def __init__(self, folder):
        self.folder = folder
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        config = self.model.config
        self.heads = config.num_hidden_layers * config.num_key_value_heads

    def attentions(self):
        return [layer.self_attn for layer in self.model.model.layers]

    def encode(self, text):
        """Token ids of a text, as KVzip's own prompts are made."""
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder)
        return tokenizer.encode(text, add_special_tokens=False)

    def prefill(self, prompt, runs):
        """One pass over a prompt, which all runs follow; its cache and its last logits."""
        cache = transformers.DynamicCache()

        def follow(module, args, kwargs, output):
            layer = cache.layers[module.layer_idx]
            for run in runs:
                run.take(module, args, kwargs, output, layer.keys, layer.values)

        with contextlib.ExitStack() as stack:
            for run in runs:
                # This prepares the model; its hooks would compress one after the other.
                with run.press(self.model):
                    pass
            for module in self.attentions():
                hook = module.register_forward_hook(follow, with_kwargs=True)
                stack.callback(hook.remove)
            out = self.model(input_ids=prompt, past_key_values=cache, logits_to_keep=1)
        return cache, out.logits[0, 0]

    def kvzip(self, prompt, head, presses):
        """KVzip's runs on a prompt whose first `head` tokens open the chat template.

        kvpress takes that number from the template whatever the prompt, so that prompts that open
        otherwise lose as many tokens of their text: the true one is put in its place. Prompts
        without a template are repeated after a line break, as kvpress does for such models.
        """
        first, *_ = presses
        scores = []
        first.compress_post = lambda model: scores.append(first.score_val)
        start = time.perf_counter()
        cache = transformers.DynamicCache()
        with first(self.model):
            first.prefix_length = head
            if not head:
                first._suffix_ids = torch.tensor([self.encode("\n")])
            self.model.model(input_ids=prompt, past_key_values=cache)
        del first.compress_post
        seconds = time.perf_counter() - start
        runs = []
        for press in presses:
            run = Run(press)
            run.seconds = seconds
            press.score_val = scores[0].clone()
            press.compress_post(self.model)
            for module, layer in zip(self.attentions(), cache.layers):
                run.cache.update(layer.keys, layer.values, module.layer_idx)
                run.masked.append(module.masked_key_indices)
                module.masked_key_indices = None
            runs.append(run)
        return runs

    def feed(self, cache, masked, tokens, start):
        """Logits after each of some tokens that follow position `start`.

        All at once, unless layers are of unequal lengths, for which no mask over several tokens is
        right, or no fake key for masked KVs suits every query that is fed with it.
        """
        if not tokens:
            return []
        lengths = [layer.keys.shape[2] for layer in cache.layers]
        for module, hidden in zip(self.attentions(), masked):
            module.masked_key_indices = hidden
        try:
            if len(set(lengths)) == 1:
                try:
                    return self.step(cache, tokens, start)
                except ValueError:
                    for layer, length in zip(cache.layers, lengths):
                        layer.keys = layer.keys[:, :, :length]
                        layer.values = layer.values[:, :, :length]
            return [self.step(cache, [t], start + n)[0] for n, t in enumerate(tokens)]
        finally:
            for module in self.attentions():
                module.masked_key_indices = None

    def step(self, cache, tokens, start):
        """Logits after each of some tokens that are fed at once."""
        out = self.model(
            input_ids=torch.tensor([tokens]),
            past_key_values=cache,
            position_ids=torch.arange(start, start + len(tokens))[None],
        )
        return list(out.logits[0])

    def score_run(self, run, job, full, last):
        """Scores of the true answer behind what a press left, and an answer of its own.

        Args:
            run: the press, done with the compressed part.
            job: the job.
            full: logits of the full cache for each target token.
            last: logits of the full prefill after the compressed part.
        """
        prompt, cut, target = job["prompt"], job["cut"], torch.tensor(job["target"])
        # An answer of its own begins here, unless more than that is compressed.
        opened = max(job["opened"], cut)
        before = self.feed(run.cache, run.masked, prompt[cut:opened], cut)
        lengths = [layer.keys.shape[2] for layer in run.cache.layers]
        after = [*prompt[opened:], *job["target"][:-1]]
        rows = [*before, *self.feed(run.cache, run.masked, after, opened)]
        # Where nothing stands between prompt and answer, the answer's first token comes from the
        # prefill, as in generation.
        scores = torch.stack([full[0], *rows])[-len(target) :]
        found = score(scores.log_softmax(-1), full.log_softmax(-1), target)
        if opened > job["opened"] or not job["free_tokens"]:
            return found
        for layer, length in zip(run.cache.layers, lengths):
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
        next_scores = before[-1] if before else last
        free = [int(next_scores.argmax())]
        while len(free) < job["free_tokens"] and free[-1] not in job["eos"]:
            at = opened + len(free) - 1
            free.append(int(self.feed(run.cache, run.masked, free[-1:], at)[0].argmax()))
        return {**found, "free": free}

    def run(self, job):
        if "encode" in job:
            return {"ids": self.encode(job["encode"])}
        prompt, cut, target = job["prompt"], job["cut"], job["target"]
        given = torch.tensor([prompt[:cut]])
        kinds = {"sdpa": [], "eager": [], "kvzip": []}
        for n, entry in enumerate(job["presses"]):
            kind = {"observed-attention": "eager", "kvzip": "kvzip"}.get(entry["press"], "sdpa")
            kinds[kind].append(n)
        start = time.perf_counter()
        try:
            runs = self.runs([job["presses"][n] for n in kinds["sdpa"]], cut)
            cache, last = self.prefill(given, runs)
        except REFUSED:
            runs = None
            start = time.perf_counter()
            cache, last = self.prefill(given, [])
        seconds = time.perf_counter() - start - sum(run.seconds for run in runs or ())
        fed = [*prompt[cut:], *target[:-1]]
        full = torch.stack([last, *self.feed(cache, [], fed, cut)])[-len(target) :]
        if job.get("logits_to"):
            # One row of float32, in the machine's own order of bytes.
            with open(job["logits_to"], "wb") as file:
                file.write(full[0].contiguous().numpy().tobytes())
        found = {}
        for kind, places in kinds.items():
            done = runs if kind == "sdpa" else None
            found |= self.results(kind, places, given, full, last, job, done)
        reference = full.log_softmax(-1)
        return {
            "full": score(reference, reference, torch.tensor(target)),
            "prefill": seconds,
            "results": [found[n] for n in range(len(found))],
        }

    def presses(self, entries, length):
        return [
            make_press(entry["press"], entry["kvs"] / (self.heads * length), length)
            for entry in entries
        ]

    def runs(self, entries, length):
        """Runs of presses on a prompt of that length, not yet done."""
        presses = self.presses(entries, length)
        return [Run(press, entry["positions"]) for press, entry in zip(presses, entries)]

    def compressed(self, kind, given, entries, head):
        """Runs of presses that share a prefill, done with the prompt."""
        length = given.shape[1]
        if kind == "kvzip":
            return self.kvzip(given, head, self.presses(entries, length))
        runs = self.runs(entries, length)
        if kind == "eager":
            self.model.set_attn_implementation("eager")
        try:
            self.prefill(given, runs)
        finally:
            self.model.set_attn_implementation("sdpa")
        return runs

    def results(self, kind, places, given, full, last, job, runs=None):
        """Scores of presses that share a prefill, by their places in the job; `runs` if done."""
        if not places:
            return {}
        try:
            entries = [job["presses"][n] for n in places]
            runs = runs or self.compressed(kind, given, entries, job["head"])
        except REFUSED as error:
            if len(places) == 1:
                # A press may refuse a prompt: shorter than its window, for instance.
                return {places[0]: {"error": f"{type(error).__name__}: {error}"}}
            alone = [self.results(kind, [n], given, full, last, job) for n in places]
            return {n: result for results in alone for n, result in results.items()}
        found = {}
        for n, run in zip(places, runs):
            start = time.perf_counter()
            found[n] = run.found()
            try:
                found[n] |= self.score_run(run, job, full, last)
            except REFUSED as error:
                # No fake key may be found.
                found[n] = {"error": f"{type(error).__name__}: {error}"}
                continue
            found[n]["score_seconds"] = time.perf_counter() - start
        return found


def score(scores, reference, target):
    """em over the whole target; nll, kl and agree over what follows its first token."""
    top = scores.argmax(-1)
    found = {"em": int(bool((top == target).all())), "nll": None, "kl": None, "agree": None}
    if len(target) > 1:
        rest, full = scores[1:], reference[1:]
        found["nll"] = -rest.gather(-1, target[1:, None]).mean().item()
        found["kl"] = (full.exp() * (full - rest)).sum(-1).mean().item()
        found["agree"] = (top[1:] == full.argmax(-1)).float().mean().item()
    return found


def version(name):
    from importlib.metadata import version as installed

    return installed(name)


def main():
    if sys.argv[1] == "--versions":
        names = ("kvpress", "transformers", "torch")
        print(json.dumps({name: version(name) for name in names}))
        return
    transformers.utils.logging.disable_progress_bar()
    threads = os.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(int(threads) if threads else os.cpu_count() or 1)
    with torch.inference_mode():
        # Libraries may print: the answers alone go to stdout.
        with contextlib.redirect_stdout(sys.stderr):
            peer = Peer(sys.argv[1])
        for line in sys.stdin:
            with contextlib.redirect_stdout(sys.stderr):
                answer = peer.run(json.loads(line))
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
