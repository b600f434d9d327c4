"""What tests ask of an error about an argument: its class and the argument that would have to change, not its sentence."""

from collections.abc import Generator
from contextlib import contextmanager

import pytest

from cachestore.core.errors import BadInput


@contextmanager
def refused(option: str, kind: type[BadInput] = BadInput) -> Generator[None]:
    """Fail unless the block raises BadInput, or `kind`, and names this option."""
    with pytest.raises(kind) as error:
        yield
    assert error.value.option == option
