"""The one exception that user input raises."""


class UserError(Exception):
    """Bad input: one line that names the value and the way out.

    Scripts print it as ``error: …`` on stderr and exit with code 2, without a traceback. Names in
    it come from files that strangers made: what would break the line or steer a terminal is
    written as its escape.
    """

    def __str__(self) -> str:
        text = super().__str__()
        if text.isprintable():
            return text
        line = " ".join(text.splitlines())
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
