"""What tests ask an error for, besides its class."""

from collections.abc import Callable

from cachestore.core.errors import BadInput


def about(option: str) -> Callable[[BadInput], bool]:
    """For `pytest.raises(..., check=about("crop"))`: whether this argument would have to change."""
    return lambda error: error.option == option
