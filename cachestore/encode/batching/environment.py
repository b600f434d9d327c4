"""Environment variables that a process needs before it tokenises or loads models."""

from collections.abc import Generator, MutableMapping
from contextlib import contextmanager

SETTINGS = {
    "TOKENIZERS_PARALLELISM": "false",  # its thread pool does not survive a fork, and one caption is too small to split
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",  # diffusers warns of every truncated caption; the report counts them
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # theirs would overwrite ours
}


def set_library_defaults(environment: MutableMapping[str, str]) -> None:
    """Set the variables of SETTINGS that are not set yet. `TOKENIZERS_PARALLELISM` is always set. Call it before loading a model."""
    for name, value in SETTINGS.items():
        environment.setdefault(name, value)
    environment["TOKENIZERS_PARALLELISM"] = "false"


@contextmanager
def library_defaults(environment: MutableMapping[str, str]) -> Generator[None]:
    """Set these variables for a block, and restore them, as the process is the caller's."""
    before = {name: environment[name] for name in SETTINGS if name in environment}
    set_library_defaults(environment)
    try:
        yield
    finally:
        for name in SETTINGS:
            environment.pop(name, None)
        environment.update(before)
