"""Pages in a real browser: frames of one window, each of which posts what it found out about itself."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple

import pytest

__all__ = ["BROWSER", "PROBE", "Answers", "ask_frames"]

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PROBE = """
<script>
window.complaints = [];
addEventListener('error', event => complaints.push(String(event.message)));
addEventListener('securitypolicyviolation', event => complaints.push(event.violatedDirective));
console.error = console.warn = text => complaints.push(String(text));
</script>
"""
# Headless chromium has no window narrower than 500 pixels, but a frame in it may be of any width.
_OUTSIDE = """<!doctype html><html><body><pre id="answers"></pre><script>
const answers = [];
addEventListener('message', event => {
  answers.push(JSON.parse(event.data));
  document.getElementById('answers').textContent = JSON.stringify(answers);
});
</script>FRAMES</body></html>"""


class Answers(NamedTuple):
    """What the frames posted, and what the browser's console has."""

    posted: list[dict[str, Any]]
    console: list[str]


def ask_frames(folder: Path, frames: Mapping[int, str], *options: str, seconds: int, milliseconds: int) -> Answers:
    """Open pages of a folder in frames and return what they post to the window around them.

    Args:
        folder: where the pages lie, and where the browser keeps what it needs.
        frames: the address of each page, by the width of its frame in pixels.
        options: of the browser, besides.
        seconds: it may take.
        milliseconds: of the pages' own clock.
    """
    assert BROWSER is not None
    cells = (
        f'<iframe src="{address}" style="width:{width}px;height:900px;border:0"></iframe>'
        for width, address in frames.items()
    )
    (folder / "outside.html").write_text(_OUTSIDE.replace("FRAMES", "".join(cells)), encoding="utf-8")
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=2000,1000",
        f"--virtual-time-budget={milliseconds}",
        "--enable-logging=stderr",
        "--v=0",
        *options,
        "--dump-dom",
        f"file://{folder / 'outside.html'}",
    ]
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        said, complained = started.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        pytest.fail(f"the browser gave no page within {seconds} seconds: {started.communicate()[1][-500:]}")
    assert started.returncode == 0, complained[-2000:]
    answer = re.search(r'<pre id="answers">(.*?)</pre>', said, re.DOTALL)
    assert answer is not None and answer[1], complained[-2000:]
    console = [line for line in complained.splitlines() if "CONSOLE" in line]
    return Answers(json.loads(unescape(answer[1])), console)
