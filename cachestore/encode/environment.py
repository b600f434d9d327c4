"""What must stand in a process's environment before it tokenises or loads models."""

from collections.abc import MutableMapping

SETTINGS = {
    "TOKENIZERS_PARALLELISM": "false",  # The tokenizers' thread pool does not survive a fork, and a caption is too small to share.
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",  # diffusers warns of every truncated caption; the report counts them.
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # A bar of ours counts; theirs would draw over it.
}


def set_library_defaults(environment: MutableMapping[str, str]) -> None:
    """Add what is not there to `os.environ` before the first model is loaded. `TOKENIZERS_PARALLELISM` is set whatever it was."""
    for name, value in SETTINGS.items():
        environment.setdefault(name, value)
    environment["TOKENIZERS_PARALLELISM"] = "false"
