"""The page of a report: a single self-contained HTML file.

page.html is the frame, page.css the style, and page.js renders the data, which is embedded as JSON. A
Content-Security-Policy in the head allows this script and this style by their hashes and nothing else: no requests, no
other scripts.
"""

import base64
import hashlib
import json
from html import escape
from pathlib import Path
from string import Template

from hop.numerics.spelling import JsonObject

_FOLDER = Path(__file__).parent


def html(report: JsonObject | None, sweep: JsonObject | None = None) -> str:
    """Render `Report.to_dict()`, `Sweep.to_dict()`, or both."""
    style, script = _read("page.css"), _read("page.js")
    known = report or sweep or {}
    title = known.get("name") or "report"
    sentences = [*(sweep or {}).get("summary", ()), *(report or {}).get("summary", ())]
    policy = f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src '{_hash(style)}'; "
    policy += f"script-src '{_hash(script)}'"
    return Template(_read("page.html")).substitute(
        policy=escape(policy),
        title=escape(title),
        summary="\n".join(f"<li>{escape(sentence)}</li>" for sentence in sentences),
        style=style,
        script=script,
        data=embedded({"report": report, "sweep": sweep}),
    )


def embedded(data: object) -> str:
    """Serialize to JSON that is safe inside a script element: no character can begin a tag, a comment or an entity."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII only
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
