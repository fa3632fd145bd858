"""Ways to store a whole prompt that the engine's pool has no place for: evaluation alone has them.

A codec of the pool stores each KV by itself, in as many bytes as any other. What these methods of
papers store of one depends on its prompt, on queries or on other layers: outliers and low-rank
terms beside codes, more bits for what is read more, a basis for several layers. So a prompt is
stored and restored whole, and answers are read from what came back. One file per method: formula,
bytes, paper.
"""

from collections.abc import Mapping

from kvjax.eval.prompt_codecs.base import PromptCodec
from kvjax.eval.prompt_codecs.gear import Gear
from kvjax.eval.prompt_codecs.kivi import KCVT, KIVI, KeysByChannel
from kvjax.eval.prompt_codecs.kvquant import KVQuant
from kvjax.eval.prompt_codecs.kvquant_calibrated import CalibratedKVQuant
from kvjax.eval.prompt_codecs.mikv import MiKV
from kvjax.eval.prompt_codecs.minicache import MiniCache
from kvjax.eval.prompt_codecs.rotatekv import RotateKV
from kvjax.eval.prompt_codecs.xkv import XKV
from kvjax.eval.prompt_codecs.xquant import XQuant
from kvjax.eval.prompt_codecs.xquant_cl import XQuantCL
from kvjax.eval.prompt_codecs.zipcache import ZipCache

PROMPT_CODECS: Mapping[str, PromptCodec] = {
    method.name: method
    for method in (
        KCVT,
        KeysByChannel(bits=3),
        KIVI,
        Gear(),
        Gear(codes=KIVI),
        MiKV(),
        MiKV(high=4),
        ZipCache(),
        KVQuant(bits=4),
        KVQuant(),
        KVQuant(bits=2),
        CalibratedKVQuant(bits=4),
        CalibratedKVQuant(),
        CalibratedKVQuant(bits=2),
        RotateKV(bits=4),
        RotateKV(),
        MiniCache(),
        XKV(),
        XQuant(),
        XQuant(bits=3),
        XQuant(bits=2),
        XQuantCL(),
        XQuantCL(bits=3),
        XQuantCL(bits=2),
    )
}
"""What --kv-dtype calls them. `kvjax.cache.store.named.OF_PROMPTS` refuses the same names
elsewhere."""

__all__ = ["PROMPT_CODECS", "PromptCodec"]
