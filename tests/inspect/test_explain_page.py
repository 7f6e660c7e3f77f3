"""The page of ``attngen explain --html``: it loads nothing, and shows what the explanation says."""

from __future__ import annotations

import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from attngen import cli
from attngen.errors import CallError
from attngen.inspect.of_spec import explain_spec
from attngen.inspect.page import page
from attngen.plan import plan
from attngen.render import render
from attngen.schema import expand, load_spec

SPEC = """
schema: 1
arch: [sm90a]
variants:
  mine: {mask: "q_pos >= kv and q_pos - kv < 300 and 1 < 2"}
kernels:
  - {variant: mine, head_dim: 64, backend: [BACKEND], passes: [PASSES]}
"""


@pytest.fixture
def written(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """A spec, and the page of its kernels at 1,000 tokens."""
    backend, passes = request.param
    spec, file = tmp_path / "mine.yaml", tmp_path / "page.html"
    spec.write_text(SPEC.replace("BACKEND", backend).replace("PASSES", passes))
    arguments = ["explain", str(spec), "--seqlen", "1000", "--html", str(file)]
    result = CliRunner().invoke(cli.group, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith(f": {len(expand(load_spec(spec)))} kernel{'s' if 'forward,' in passes else ''}\n")
    return spec, file


class Balanced(HTMLParser):
    """Checks that every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


CASES = [("cuda", "forward, backward"), ("triton", "forward")]


@pytest.mark.parametrize("written", CASES, indirect=True)
def test_the_page_loads_nothing_and_shows_tiles_plan_and_source(written: tuple[Path, Path]) -> None:
    spec, file = written
    text = file.read_text()
    parser = Balanced()
    parser.feed(text)
    assert not parser.open
    assert not re.search(r"<(script|link|img|iframe)|src=|url\(|href=\"(?!#)", text)
    for one in explain_spec(spec, seqlens=[1000], pictures=True):
        assert one.tiles_seqlen == 1000
        section = text[text.index(f'<h2 id="{one.plan.name}">') :].partition("</svg>")[0]
        kinds = [kind for row in one.tiles for kind in row]
        assert section.count(": full</title>") == kinds.count(2) > 0
        assert section.count(": partial</title>") == kinds.count(1) > 0
        for label, said in one.summary():
            assert f"<th>{label}</th>" in text
            assert said in unescape(text)
    for kernel in expand(load_spec(spec)):
        source, shown = render(plan(kernel)).text, unescape(re.sub(r"<[^>]*>", "", text))
        comment = "//" if "__global__" in source else "#"
        for line in source.splitlines():
            assert line.strip().startswith(comment) or line in shown, line


def test_a_page_has_few_kernels(tmp_path: Path) -> None:
    spec = tmp_path / "mine.yaml"
    spec.write_text(SPEC.replace("[BACKEND]", "cuda").replace("[PASSES]", "forward"))
    (one,) = explain_spec(spec, seqlens=[128], pictures=True)
    with pytest.raises(CallError, match="13 kernels are too many for one page, at most 12"):
        page("all", [one] * 13)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
@pytest.mark.parametrize("written", CASES, indirect=True)
def test_a_browser_shows_it(written: tuple[Path, Path], tmp_path: Path) -> None:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    shown = subprocess.run(
        [*command, "--dump-dom", written[1].as_uri()], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert shown.count("<h3>Source</h3>") == shown.count("<svg") == shown.count("<h2 ") >= 1
    assert "ERR_" not in shown
