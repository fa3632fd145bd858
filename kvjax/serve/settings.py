"""What an operator sets of the server itself; sizes of the engine are `EngineConfig`'s."""

import dataclasses

from kvjax.checks import INT32_MAX, check_flag, check_number, check_text, check_whole, shown
from kvjax.errors import UserError


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """Limits of a server, and who may use it.

    Raises:
        UserError: a value has the wrong type or is out of range; one line that names it.
    """

    served_name: str | None = None
    """What clients call the model; its own name by default."""
    api_keys: tuple[str, ...] = ()
    """Any of these opens the server, as `Authorization: Bearer KEY`; without any, it is open."""
    hosts: tuple[str, ...] | None = None
    """Names and addresses by which it is asked for, in small letters; None for any. A page of
    another site that lets its own name lead to this machine is refused by them."""
    deadline: float | None = 600.0
    """Seconds after which a request ends with what it has; clients may ask for fewer."""
    max_body_bytes: int = 4 << 20
    """Most bytes of a request's body."""
    max_tokens: int | None = None
    """Most tokens that a request may generate; as many as fit its context by default."""
    default_max_tokens: int = 1024
    """Tokens of an answer where the client sets no limit, or as many as fit."""
    max_choices: int = 64
    """Most sequences of one request: its prompts times n."""
    methods: tuple[str, ...] = ()
    """Methods that requests may ask for, beside the engine's own and `full`."""
    drain_seconds: float = 30.0
    """How long requests that run may go on after SIGTERM."""
    keep_alive_seconds: float = 15.0
    """Silence in a stream after which a comment is sent, so that nobody between takes it for
    dead."""
    log_prompts: bool = False
    """Write prompts and answers into the log."""
    page: bool = True
    """Serve the page at /."""

    def __post_init__(self):
        for name, least, most in (
            ("max_body_bytes", 1, 1 << 40),
            ("default_max_tokens", 1, INT32_MAX),
            ("max_choices", 1, 4096),
        ):
            check_whole(name, getattr(self, name), least, most)
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, 1)
        for name in ("drain_seconds", "keep_alive_seconds"):
            check_number(name, getattr(self, name), 0, 86400)
        if self.deadline is not None:
            check_number("deadline", self.deadline, 0, above=True)
        if self.served_name is not None and not check_text("served_name", self.served_name):
            raise UserError("served_name '': give a name of at least one letter")
        for name in ("log_prompts", "page"):
            check_flag(name, getattr(self, name))
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise UserError(
                    f"an API key of {len(key)} letters: give printable ASCII without spaces"
                )
        for host in self.hosts or ():
            if not check_text("hosts", host) or host != host.lower():
                raise UserError(f"hosts {shown(host)}: give names or addresses in small letters")
        for method in self.methods:
            check_text("methods", method, f"names of methods, not {shown(method)}")
