"""The kvpress half of scripts/compare_kvpress.py; runs in a Python with torch and kvpress.

    python scripts/compare_kvpress_peer.py --versions
    python scripts/compare_kvpress_peer.py MODEL_FOLDER < jobs.jsonl

A job is a JSON line: token ids of a prompt, how many of them are compressed, the target's token
ids, and presses with the KVs that each may keep. The answer is a JSON line: scores of the full
cache and of every press. `logits_to` names a file for the full cache's logits after the prompt.

What follows the compressed part is fed token by token: presses may leave layers of unequal
lengths, for which no mask over several tokens is right.
"""

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
        "streaming-llm": lambda: kvpress.StreamingLLMPress(ratio),
        "tova": lambda: kvpress.TOVAPress(ratio),
        "observed-attention": lambda: kvpress.ObservedAttentionPress(ratio),
        "kvzip": lambda: kvpress.KVzipPress(exact),
    }
    return makers[name]()


class Kept:
    """Token positions that a press leaves, by layer: it is asked to prune them like values."""

    def __init__(self, press):
        self.layers = {}
        prune = press.compress

        def compress(module, hidden_states, keys, values, attentions, kwargs):
            position = torch.arange(keys.shape[2], dtype=values.dtype)[:, None]
            position = position.expand(values.shape).contiguous()
            _, kept = prune(module, hidden_states, keys, position, attentions, kwargs)
            self.layers[module.layer_idx] = kept[0, :, :, 0].int()
            return prune(module, hidden_states, keys, values, attentions, kwargs)

        press.compress = compress


class Peer:
    def __init__(self, folder):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        config = self.model.config
        self.heads = config.num_hidden_layers * config.num_key_value_heads

    def attentions(self):
        return [layer.self_attn for layer in self.model.model.layers]

    def compress(self, prompt, name, kvs, wants_positions):
        """The cache of a prompt after a press, the KVs in use, and their positions."""
        length = prompt.shape[1]
        press = make_press(name, kvs / (self.heads * length), length)
        kept = Kept(press) if wants_positions else None
        for module in self.attentions():
            module.masked_key_indices = None
        cache = transformers.DynamicCache()
        eager = name == "observed-attention"
        if eager:
            self.model.set_attn_implementation("eager")
        try:
            with press(self.model):
                self.model.model(input_ids=prompt, past_key_values=cache)
        finally:
            if eager:
                self.model.set_attn_implementation("sdpa")
        held = [layer.keys.shape[1] * layer.keys.shape[2] for layer in cache.layers]
        hidden = [getattr(module, "masked_key_indices", None) for module in self.attentions()]
        masked = sum(0 if h is None else len(h[2]) for h in hidden)
        size = sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in cache.layers)
        found = {
            "kvs": sum(held) - masked,
            "bytes": size,
            "ratio": float(press.compression_ratio),
            "simulated": masked > 0,
        }
        if kept is not None:
            found["positions"] = [kept.layers[i].tolist() for i in sorted(kept.layers)]
        return cache, found

    def feed(self, cache, tokens, start):
        """Logits after each of some tokens that follow position `start`, one at a time."""
        rows = []
        for n, token in enumerate(tokens):
            out = self.model(
                input_ids=torch.tensor([[token]]),
                past_key_values=cache,
                position_ids=torch.tensor([[start + n]]),
            )
            rows.append(out.logits[0, 0])
        return rows

    def run(self, job):
        prompt, cut, target = job["prompt"], job["cut"], job["target"]
        start = time.perf_counter()
        whole = torch.tensor([prompt + target[:-1]])
        out = self.model(input_ids=whole, logits_to_keep=len(target))
        full = out.logits[0]
        prefill = time.perf_counter() - start
        if job.get("logits_to"):
            # One row of float32, in the machine's own order of bytes.
            with open(job["logits_to"], "wb") as file:
                file.write(full[0].contiguous().numpy().tobytes())
        wanted = torch.tensor(target)
        reference = full.log_softmax(-1)
        answer = {"full": score(reference, reference, wanted), "prefill": prefill, "results": []}
        for entry in job["presses"]:
            try:
                answer["results"].append(self.run_press(prompt, cut, target, full, entry))
            except (AssertionError, ValueError) as error:
                # A press may refuse a prompt: shorter than its window, no fake key to be found.
                answer["results"].append({"error": f"{type(error).__name__}: {error}"})
        return answer

    def run_press(self, prompt, cut, target, full, entry):
        """Scores of one press, given the full cache's logits of the target."""
        start = time.perf_counter()
        cache, found = self.compress(
            torch.tensor([prompt[:cut]]), entry["press"], entry["kvs"], entry["positions"]
        )
        found["compress_seconds"] = time.perf_counter() - start
        start = time.perf_counter()
        fed = prompt[cut:]
        rows = self.feed(cache, fed + target[:-1], cut)
        if fed:
            scores = torch.stack(rows[len(fed) - 1 :])
        else:
            # The first token of the answer comes from the prefill, as in generation.
            scores = torch.stack([full[0], *rows])
        found |= score(scores.log_softmax(-1), full.log_softmax(-1), torch.tensor(target))
        found["score_seconds"] = time.perf_counter() - start
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
