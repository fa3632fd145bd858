"""Every name that code reads is defined: checkers are told to look past it, as jaxtyping's axis
names are not."""

import builtins
import symtable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GIVEN = {*dir(builtins), "__file__"}
"""Names that every module has."""


def undefined(source: str, file: str = "<test>") -> set[str]:
    """Names that some code reads from its module, which has none of them."""
    module = symtable.symtable(source, file, "exec")
    known, scopes, found = set(GIVEN), [module], set()
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        for symbol in scope.get_symbols():
            name = symbol.get_name()
            if scope is module or symbol.is_declared_global():
                known |= {name} if symbol.is_assigned() or symbol.is_imported() else set()
            if symbol.is_referenced() and (scope is module or symbol.is_global()):
                found.add(name)
    return found - known


def test_every_name_is_defined():
    wrong = {}
    for folder in ("kvjax", "scripts", "benchmarks", "examples", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            if found := undefined(path.read_text(), str(path)):
                wrong[str(path.relative_to(ROOT))] = found
    assert not wrong


def test_what_is_missing_is_found():
    source = """
from a import b
def f(x: "L H") -> "N":
    global later
    later = 1
    def g(): return [x + y + jax for y in later] + len(b)
    return g
class C(Base): z = f
"""
    assert undefined(source) == {"jax", "Base"}
