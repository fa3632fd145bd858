"""The server: an OpenAI-compatible HTTP front of `AsyncLLM`, and the page that shows its cache.

Here: what clients send and get, who may ask, limits, logs, draining. Not here: options, and loading
a model (`kvjax.cli.serve`); scheduling and memory are the engine's. Importing this package needs
the extra `serve`.
"""

from kvjax.serve.app import make_app
from kvjax.serve.server import bind, run_server
from kvjax.serve.service import Service
from kvjax.serve.settings import ServerSettings

__all__ = ["ServerSettings", "Service", "bind", "make_app", "run_server"]
