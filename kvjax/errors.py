"""The one exception that user input raises."""


class UserError(Exception):
    """Bad input: one line that names the value and the way out.

    Scripts print it as ``error: …`` on stderr and exit with code 2, without a traceback.
    """
