"""The roofline picture shows every row of the result, below its roof."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from moetier_bench.roofline import roofline_svg

SVG = "{http://www.w3.org/2000/svg}"


def row(tokens, isa, threads, gbps, gops):
    return {
        "M": tokens,
        "isa": isa,
        "threads": threads,
        "gbps": gbps,
        "gops": gops,
        "read_gbps": 34.0,
        "peak_gops": 940.0,
    }


@pytest.fixture
def result():
    rows = [row(1, "avx512", 2, 31.7, 119.2), row(64, "avx512", 2, 23.1, 521.2), row(1, "avx2<", 1, 20.0, 75.2)]
    shape = {"hidden": 4096, "intermediate": 2048, "experts": 64, "top_k": 6, "slices": 1}
    return {"machine": {"cpu": "A & B"}, "shape": shape, "rows": rows}


def test_every_row_is_a_point_with_its_tokens(result):
    picture = ElementTree.fromstring(roofline_svg(result))
    assert len(picture.findall(f"{SVG}circle")) == 3
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert texts.count("M=1") == 2
    assert texts.count("M=64") == 1
    assert {"avx512, 2 threads", "avx2<, 1 thread"} <= set(texts)
    assert any("A & B" in text for text in texts)


def test_points_lie_inside_and_under_the_roof(result):
    picture = ElementTree.fromstring(roofline_svg(result))
    roofs = [path.get("d") for path in picture.iter(f"{SVG}path") if path.get("stroke-dasharray")]
    ceiling = [float(re.findall(r"[\d.]+", roof)[-1]) for roof in roofs]
    for circle in picture.iter(f"{SVG}circle"):
        assert 70 <= float(circle.get("cx")) <= 700
        assert min(ceiling) <= float(circle.get("cy")) <= 380
