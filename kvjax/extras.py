"""Packages that only an extra of this one installs: who needs one says so before it works."""

from importlib.util import find_spec

from kvjax.errors import UserError


def check_extra(package: str, extra: str, what: str) -> None:
    """Refuse what needs a package that is not there.

    Args:
        package: by the name that is imported.
        extra: of kvjax that installs it.
        what: needs it.

    Raises:
        UserError: it is not installed; says how it would be.
    """
    if find_spec(package) is None:
        raise UserError(f"{what} needs {package}: pip install '.[{extra}]' in kvjax's checkout")
