"""The code that a page shows for SimpleTuner is what `conformance/trainers.py simpletuner --live` runs, and short enough to keep."""

import ast

import pytest
from conformance import trainer_simpletuner_live as live

pytestmark = pytest.mark.torch


def test_the_code_of_the_page_has_at_most_60_lines_and_replaces_both_classes_of_the_factory():
    code = live.code_of(live.PAGE)
    assert len(code.splitlines()) <= 60
    replaced = {node.attr for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    assert replaced == {"VAECache", "TextEmbeddingCache"}
