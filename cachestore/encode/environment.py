"""Environment variables that a process needs before it tokenises or loads models."""

from collections.abc import MutableMapping

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
