"""Compiled programs kept on disk, so that the next process need not compile them again."""

import os

import jax

from kvjax.models.hub import user_cache_dir


def enable_compilation_cache() -> None:
    """Keep compiled programs below `user_cache_dir()`, unless JAX_COMPILATION_CACHE_DIR is set.

    Where the folder cannot be made, programs are compiled anew: slower, and nothing worse.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = user_cache_dir() / "compiled"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
