"""What cannot be imported is named in a sentence, with what helps; other errors stay as they are."""

import pytest

from cachestore.core.errors import BadInput, CacheStoreError, MissingExtra, importing, naming_extras
from tests.fakes import tells_of


@pytest.mark.parametrize("error", [ImportError("libtorch.so: no room", name="torch._C"), OSError("libgomp.so.1: no room"), MemoryError()])
def test_a_package_that_finds_no_room_is_named(error):
    with pytest.raises(MissingExtra) as raised, importing("torch"):
        raise error
    assert raised.value.__cause__ is error


def test_a_package_that_is_not_installed_is_named_with_its_extra():
    with pytest.raises(MissingExtra, check=tells_of("av", "[video]")), importing("videos"):
        raise ModuleNotFoundError("no av", name="av")


def test_a_library_that_cannot_be_loaded_within_other_work_is_an_error_of_ours():
    with pytest.raises(MissingExtra), naming_extras():
        raise ImportError("libtorch.so: no room", name="_C")


@pytest.mark.parametrize(
    "error",
    [
        OSError("a disk"),
        MemoryError(),
        BadInput("a value"),
        CacheStoreError("any"),
        MissingExtra("known"),
        ImportError("x", name="cachestore.y"),
    ],
)
def test_other_errors_of_that_work_stay_as_they_are(error):
    with pytest.raises(type(error)) as raised, naming_extras():
        raise error
    assert raised.value is error
