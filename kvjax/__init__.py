"""kvjax: KV-cache compression on JAX, with a paged cache per (sequence, layer, KV head)."""

__version__ = "0.1.0"
