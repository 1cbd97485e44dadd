"""The page at /: a prompt is tried, and each token has the colour of the head that wins it. It loads nothing from elsewhere."""

from __future__ import annotations

import functools
from importlib.resources import files

from starlette.responses import Response

PARTS = {
    "/": ("text/html", ("headmax.serve/page/index.html",)),
    "/page.css": ("text/css", ("headmax.analysis/page/style.css", "headmax.serve/page/page.css")),
    "/page.js": ("text/javascript", ("headmax.analysis/page/heads.js", "headmax.serve/page/page.js")),
}
"""Each path's type, and the files that make it: what the report of `headmax inspect` has too, and what only this page has."""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


@functools.cache
def text(path: str) -> str:
    names = (name.partition("/") for name in PARTS[path][1])
    return "\n".join((files(package) / name).read_text(encoding="utf-8") for package, _, name in names)


def part(path: str) -> Response:
    return Response(text(path), headers=HEADERS, media_type=PARTS[path][0])
