# Read by the type checker alone, in place of a library of which it would parse thousands of files and find most of them untyped.
from typing import Any

def __getattr__(name: str) -> Any: ...
