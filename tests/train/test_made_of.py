"""What a value was made of, as numbers: the same for equal columns wherever they lie, and others for any change of what is seen."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.keys import Key, Recipe
from cachestore.files.table import Texts
from cachestore.store.format.catalog import Catalog, Cell, make_column
from cachestore.train.made_of import Expected, Shows

RECIPE = Recipe("latents", {"vae": 1})
SHOWN: dict[str, Any] = {"bucket": (64, 48), "resized": (64, 48), "crop": (0, 0, 64, 48)}


def strings(texts):
    found = Texts()
    for text in texts:
        found.append(text)
    return found.strings()


def catalog_of(rows, wrap: Callable[[list[str]], Any] = list):
    """A catalog of (captions, extras, [(input, facts)]) for each row."""
    cells = [[Cell(Key(bytes([1]) * 16), bytes([number]) * 32, facts=facts) for number, facts in listed] for _c, _e, listed in rows]
    column = make_column("latents", "image", RECIPE.fingerprint, {"resolution": 64}, cells)
    at = np.cumsum([0, *(len(captions) for captions, _extras, _cells in rows)]).tolist()
    captions = wrap([text for captions, _extras, _cells in rows for text in captions])
    ids = [str(number) for number in range(len(rows))]
    return Catalog(
        "train", {}, {RECIPE.fingerprint: RECIPE}, ids, at, captions, {}, wrap([extras for _c, extras, _cells in rows]), (column,)
    )


def ends(catalog, *, pixels=True, captions=True):
    expected = Expected.of(catalog, Shows(pixels=pixels, captions=captions), None)
    return [expected.ends[start:end].tobytes() for start, end in zip(expected.at, expected.at[1:], strict=False)]


ROWS = st.lists(
    st.tuples(
        st.lists(st.text(max_size=4), max_size=3),
        st.sampled_from(["{}", '{"a":1}']),
        st.lists(st.tuples(st.integers(0, 255), st.sampled_from([SHOWN, {**SHOWN, "flip": (1,)}, {}])), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=5,
)


@given(rows=ROWS, pixels=st.booleans(), captions=st.booleans())
def test_what_was_made_of_a_row_follows_from_the_row_alone_wherever_its_texts_lie(rows, pixels, captions):
    own = ends(catalog_of(rows), pixels=pixels, captions=captions)
    assert ends(catalog_of(rows, strings), pixels=pixels, captions=captions) == own
    assert ends(catalog_of(rows[::-1]), pixels=pixels, captions=captions) == own[::-1]


PLAIN = (["a cat", "one more"], "{}", [(7, SHOWN), (8, SHOWN)])


@pytest.mark.parametrize(
    ("other", "seen_by"),
    [
        ((["a dog", "one more"], *PLAIN[1:]), {"captions"}),
        ((["one more", "a cat"], *PLAIN[1:]), {"captions"}),
        ((["a catone more"], *PLAIN[1:]), {"captions"}),
        ((PLAIN[0], '{"a":1}', PLAIN[2]), {"captions", "pixels", "neither"}),
        ((*PLAIN[:2], [(9, SHOWN), (8, SHOWN)]), {"captions", "pixels", "neither"}),
        ((*PLAIN[:2], [(8, SHOWN), (7, SHOWN)]), {"captions", "pixels", "neither"}),
        *(
            ((*PLAIN[:2], [(7, {**SHOWN, name: values}), (8, SHOWN)]), {"pixels"})
            for name, values in (
                ("bucket", (48, 64)),
                ("resized", (65, 48)),
                ("crop", (1, 0, 64, 48)),
                ("flip", (1,)),
                ("start", (3,)),
                ("fps", (24, 1)),
            )
        ),
    ],
)
def test_a_change_is_seen_by_who_sees_it_and_by_nobody_else(other, seen_by):
    before, after = catalog_of([PLAIN, PLAIN]), catalog_of([PLAIN, other])
    for name, shows in {"captions": (False, True), "pixels": (True, False), "neither": (False, False)}.items():
        one, now = (ends(catalog, pixels=shows[0], captions=shows[1]) for catalog in (before, after))
        assert (one[0] == now[0], one[1] != now[1]) == (True, name in seen_by)


def test_another_way_of_resizing_makes_other_pixels():
    plain = catalog_of([PLAIN])
    other = Recipe("latents", {"vae": 1, "transform": {"pixels": "box"}})
    column = replace(plain.columns[0], fingerprint=other.fingerprint)
    assert ends(plain) != ends(replace(plain, recipes={other.fingerprint: other}, columns=(column,)))
    assert ends(catalog_of([])) == []
