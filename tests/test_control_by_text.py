"""Nothing decides by the text of a message: an error has a class and fields, a remark has a field of its own."""

import ast
import re
from pathlib import Path

import pytest

from tests.syntax import nodes_in, nodes_of

PACKAGE = Path(__file__).parent.parent / "cachestore"
MESSAGE = re.compile(r"str\(\w*(error|exception)\w*\)|(\w+\.)*(message|remark|reason|how|says|warning|last_words)")
"""An expression that is the text of a message, by how it is called."""
FOREIGN = {
    "cli/__init__.py": "CPython's RuntimeError when there is no memory for a thread has no class of its own",
    "encode/batching/budget.py": "torch and its backends report a lack of memory as RuntimeError",
    "jobs/start/processes.py": "all that is left of a process that died is its last output, by any library",
    "remote/client.py": "obstore has one class for every wrong configuration",
    "sources/remarks.py": "whether a sample's name is printed twice decides nothing else",
    "sources/tables.py": "the csv module has one class for every malformed file",
    "store/read/side_by_side.py": "CPython's RuntimeError when no thread can be started has no class of its own",
}
"""The files that may look into a text, and why: it is of a library that says what happened in no other way."""


def looks_into_messages(nodes):
    """The expressions that look for something in the text of a message."""
    for node in nodes:
        match node:
            case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[text]) if MESSAGE.fullmatch(ast.unparse(text)):
                yield ast.unparse(node)
            case ast.Call(func=ast.Attribute(value=text, attr="startswith" | "endswith" | "find" | "index")):
                if MESSAGE.fullmatch(ast.unparse(text)):
                    yield ast.unparse(node)
            case _:
                pass


def test_only_texts_of_foreign_libraries_are_looked_into():
    found = {path.relative_to(PACKAGE).as_posix(): [*looks_into_messages(nodes_in(path))] for path in PACKAGE.rglob("*.py")}
    assert {name: looks for name, looks in found.items() if looks and name not in FOREIGN} == {}
    assert [name for name in FOREIGN if not found.get(name)] == [], "these look into no text any more"


@pytest.mark.parametrize(
    "line", ["'x' in str(error)", "remark.endswith(END)", "one.reason.startswith('no')", "word not in child.last_words"]
)
def test_a_look_into_a_message_is_found(line):
    assert [*looks_into_messages(nodes_of(line))]
