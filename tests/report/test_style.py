"""The look of the page, as a browser measures it: nothing overflows, and every text can be read, in light and in dark mode."""

import pytest

from cachestore.report.write import write_report
from tests.report.browser import DARK, LIGHT, in_a_browser, measure
from tests.report.pictures import make

WIDTHS = (400, 1200)


@in_a_browser
@pytest.mark.processes
def test_the_measure_sees_what_overflows_and_what_is_faint(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<!DOCTYPE html><body style='background: #fff'><p style='color: #999'>faint<div style='width: 700px'>wide</div>")
    narrow, wide = measure(page, tmp_path / "browser", WIDTHS, LIGHT)
    assert (narrow["overflow"] > 300, wide["overflow"]) == (True, 0)
    assert [found["faint"] for found in (narrow, wide)] == [["faint 2.8"]] * 2


@in_a_browser
@pytest.mark.processes
def test_the_measure_sees_what_a_scrolling_box_cuts(tmp_path):
    page = tmp_path / "page.html"
    cells = "<td><div style='width: 700px'>wide</div>"
    box = f"<div class='scroll' style='overflow: auto'><table><caption>cut</caption><tr>{cells}</table></div>"
    page.write_text(f"<!DOCTYPE html><body style='background: #fff'>{box}")
    narrow, wide = measure(page, tmp_path / "browser", WIDTHS, LIGHT)
    assert ("wide" in narrow["cut"], wide["cut"]) == (True, [])


@in_a_browser
@pytest.mark.processes
@pytest.mark.parametrize(("scheme", "is_dark"), [(LIGHT, False), (DARK, True)])
def test_no_width_overflows_and_no_text_is_faint(tmp_path, scheme, is_dark):
    path = make(tmp_path, 4)
    (tmp_path / "data" / "1.png").unlink()
    (tmp_path / "data" / "2.png").write_bytes(b"another picture")
    (path / "segments" / "a stranger").write_bytes(b"x")
    write_report(path, tmp_path / "report.html")
    found = measure(tmp_path / "report.html", tmp_path / "browser", WIDTHS, scheme)
    assert [(one["width"], one["overflow"], one["faint"], one["cut"]) for one in found] == [(width, 0, [], []) for width in WIDTHS]
    assert all((sum(one["background"]) < 384) == is_dark for one in found)
