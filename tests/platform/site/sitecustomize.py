"""Python runs this at its start where this folder is on PYTHONPATH: the process, and each that it starts, then is as on Windows."""

import importlib.util
import os
import sys

found = importlib.util.spec_from_file_location("as_windows", os.path.join(os.path.dirname(os.path.dirname(__file__)), "as_windows.py"))
assert found is not None
assert found.loader is not None
module = sys.modules["as_windows"] = importlib.util.module_from_spec(found)
found.loader.exec_module(module)
module.emulate()
