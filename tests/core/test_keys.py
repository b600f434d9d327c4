"""What identifies a value."""

import json
import os
import pickle
import subprocess
import sys
from functools import reduce

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cachestore.core.errors import BadInput
from cachestore.core.keys import KEY_BYTES, Key, Recipe, canonical, digest_bytes, digest_parts, digest_text, input_key, key

texts = st.text(st.characters(exclude_categories=[]), max_size=5)
parts = st.lists(texts | st.binary(max_size=5), max_size=4)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


class TestKeys:
    def test_no_parts_make_a_fixed_key(self):
        assert key() == key()
        assert len(key()) == KEY_BYTES

    def test_a_key_is_the_same_for_ever(self):
        """Written down once: a store that exists would not be read any more if this changed."""
        assert str(key()) == "655f8fd70e409bd45570fb0faabdaaff"
        assert str(key("a", b"b", "")) == "8cafe7c8c887e9f965f686e8e8e08c3d"
        assert str(input_key("f", {"image": "00"}, {"bucket": [64, 64]})) == "e9942b4ce07a865e438a2e64b7672e54"
        assert Recipe("text", {"a": 1}).fingerprint == "cc97fb1dc86663df964287cd8a731d2b77b628c2b0051e5a5334b8e30ead0378"

    @given(one=parts, other=parts)
    def test_different_parts_make_different_keys(self, one, other):
        assume([(type(part), part) for part in one] != [(type(part), part) for part in other])
        assert key(*one) != key(*other)

    @pytest.mark.parametrize(
        ("one", "other"),
        [(("ab", "c"), ("a", "bc")), (("a",), (b"a",)), (("a", ""), ("a",)), (("a", "b"), ("b", "a")), ((), ("",))],
        ids=["boundaries", "kinds", "nothing", "order", "none"],
    )
    def test_what_matters(self, one, other):
        assert key(*one) != key(*other)

    @given(raw=st.binary(min_size=16, max_size=16))
    def test_a_key_prints_as_hex_digits_and_parses_from_them(self, raw):
        one = Key(raw)
        assert str(one) == raw.hex()
        assert Key.parse(str(one)) == Key.parse(raw) == Key.parse(one) == one
        assert repr(one) == f"Key({raw.hex()!r})"
        assert eval(repr(one), {"Key": Key}) == one
        assert f"{one}" == raw.hex()

    @pytest.mark.parametrize(
        "text", ["", "0" * 31, "0" * 33, "g" * 32, b"", b"0" * 15, b"0" * 32, " " * 32, "0 " * 16, "\u0660" * 32], ids=repr
    )
    def test_anything_else_is_refused(self, text):
        with pytest.raises(BadInput):
            Key.parse(text)

    @pytest.mark.parametrize("size", [0, 15, 17])
    def test_a_key_has_sixteen_bytes(self, size):
        with pytest.raises(BadInput):
            Key(bytes(size))

    def test_a_key_compares_hashes_sorts_and_pickles_as_its_bytes(self):
        one = key("a")
        assert one == bytes(one)
        assert hash(one) == hash(bytes(one))
        assert {one, bytes(one)} == {one}
        again = pickle.loads(pickle.dumps(one))
        assert again == one
        assert isinstance(again, Key)

    def test_a_key_is_the_same_in_every_process(self):
        program = "from cachestore.core.keys import key; print(key('a', b'b'))"
        for seed in ("0", "1"):
            finished = subprocess.run(
                [sys.executable, "-c", program],
                capture_output=True,
                text=True,
                check=True,
                timeout=50,
                env=os.environ | {"PYTHONHASHSEED": seed},
            )
            assert finished.stdout.strip() == str(key("a", b"b"))


class TestCanonical:
    @given(value=values)
    def test_it_is_json_for_the_same_value(self, value):
        assert json.loads(canonical(value)) == value

    @given(value=st.dictionaries(texts, values, max_size=4))
    def test_the_order_of_names_does_not_matter(self, value):
        assert canonical(dict(reversed(value.items()))) == canonical(value)

    @given(value=values)
    def test_what_was_read_is_written_the_same(self, value):
        assert canonical(json.loads(canonical(value))) == canonical(value)

    def test_it_has_no_spaces_and_no_escapes_that_are_not_needed(self):
        assert canonical({"b": [1, 2], "a": "é"}) == '{"a":"é","b":[1,2]}'.encode()

    @pytest.mark.parametrize(
        "value",
        [
            object(),
            {1, 2},
            b"x",
            float("nan"),
            float("inf"),
            {"a": float("-inf")},
            {("a",): 1},
            reduce(lambda one, _level: [one], range(100_000), []),
        ],
        ids=["an object", "a set", "bytes", "NaN", "infinity", "less than all", "a tuple as name", "many levels"],
    )
    def test_what_is_not_json_is_refused(self, value):
        with pytest.raises(BadInput):
            canonical(value)


class TestDigests:
    def test_nothing_has_a_digest(self):
        assert digest_bytes(b"") == digest_text("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

    def test_a_text_has_the_digest_of_its_utf8_bytes(self):
        assert digest_text("é") == digest_bytes("é".encode())
        assert digest_text("\udcff") == digest_bytes(b"\xed\xb3\xbf")

    @given(one=parts, other=parts)
    def test_parts_are_told_apart(self, one, other):
        assume([(type(part), part) for part in one] != [(type(part), part) for part in other])
        assert digest_parts(*one) != digest_parts(*other)


class TestInputKeys:
    def test_an_input_without_parts_has_a_key(self):
        assert len(input_key("f", {}, {})) == KEY_BYTES

    def test_recipe_inputs_names_order_and_transform_decide_it(self):
        base = ("f", {"a": "1", "b": "2"}, {"bucket": [64, 64]})
        others = [
            ("g", *base[1:]),
            (base[0], {"b": "2", "a": "1"}, base[2]),
            (base[0], {"a": "2", "b": "1"}, base[2]),
            (base[0], {"a": "1"}, base[2]),
            (base[0], {"x": "1", "b": "2"}, base[2]),
            (*base[:2], {"bucket": [64, 65]}),
            (*base[:2], {}),
        ]
        assert len({input_key(*each) for each in [base, *others]}) == 8

    def test_the_order_of_the_transform_does_not_matter(self):
        assert input_key("f", {}, {"a": 1, "b": 2}) == input_key("f", {}, {"b": 2, "a": 1})

    def test_it_is_no_key_of_ones_own(self):
        assert input_key("f", {}, {}) != key("f")


class TestRecipes:
    def test_an_empty_recipe_has_a_fingerprint(self):
        assert len(Recipe("text").fingerprint) == 64

    def test_make_and_encoder_decide_the_fingerprint_and_read_does_not(self):
        base = Recipe("text", {"a": 1}, {"b": 2})
        assert Recipe("text", {"a": 1}, {"b": 3}).fingerprint == base.fingerprint
        assert Recipe("text", {"a": 2}, {"b": 2}).fingerprint != base.fingerprint
        assert Recipe("latents", {"a": 1}, {"b": 2}).fingerprint != base.fingerprint

    @given(make=st.dictionaries(texts, values, max_size=3), read=st.dictionaries(texts, values, max_size=3))
    def test_a_recipe_comes_back_from_json(self, make, read):
        recipe = Recipe("text", make, read)
        again = Recipe.from_json(json.loads(canonical(recipe.as_json())))
        assert again == recipe
        assert again.fingerprint == recipe.fingerprint

    def test_a_fingerprint_that_was_written_is_not_believed(self):
        shown = Recipe("text", {"a": 1}).as_json() | {"fingerprint": "0" * 64}
        assert Recipe.from_json(shown).fingerprint == Recipe("text", {"a": 1}).fingerprint

    @pytest.mark.parametrize("shown", [{}, {"encoder": "x"}, {"encoder": "x", "make": None, "read": {}}], ids=str)
    def test_a_recipe_that_lacks_a_part_is_told_apart(self, shown):
        with pytest.raises((KeyError, TypeError, ValueError)):
            Recipe.from_json(shown)


def test_a_dict_with_keys_of_several_types_is_refused_in_words():
    with pytest.raises(BadInput, match="keys of several types"):
        canonical({5: 1, "a": 2})
