"""Pages that load nothing from elsewhere: / to try a prompt, where each token has the colour of the head that wins it, and /docs; and the
description of the interface at /openapi.json."""

from __future__ import annotations

import functools
import html
from importlib.resources import files
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from headmax import __version__
from headmax.serve.schema import ChatBody, CompletionBody

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


ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {name: {"type": kind} for name, kind in (("message", "string"), ("type", "string"))}
            | {name: {"type": ["string", "null"]} for name in ("param", "code")},
        }
    },
}
PATHS = (
    ("get", "/", "A page to try a prompt, and to see which head wins each token.", None),
    ("get", "/v1/models", "The model that is served.", None),
    ("get", "/v1/models/{name}", "The model of that name.", None),
    ("post", "/v1/completions", "Continue texts.", CompletionBody),
    ("post", "/v1/chat/completions", "Continue a conversation.", ChatBody),
    ("get", "/health", "Whether requests are taken.", None),
    ("get", "/metrics", "What the server counts, for Prometheus.", None),
)


@functools.cache
def openapi(name: str) -> dict[str, Any]:
    """OpenAPI 3.1."""
    _, schemas = models_json_schema([(CompletionBody, "validation"), (ChatBody, "validation")], ref_template="#/components/schemas/{model}")
    paths: dict[str, Any] = {}
    for method, path, about, body in PATHS:
        answers = {"200": {"description": "The answer."}, "default": {"description": "An error.", "content": _json("Error")}}
        entry: dict[str, Any] = {"summary": about, "responses": answers}
        if "{name}" in path:
            entry["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
        if body is not None:
            entry["requestBody"] = {"required": True, "content": _json(body.__name__)}
        paths.setdefault(path, {})[method] = entry
    components = {"schemas": {**schemas["$defs"], "Error": ERROR}, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
    info = {"title": f"headmax serve: {name}", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "security": [{"key": []}, {}], "paths": paths, "components": components}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def docs(name: str) -> str:
    """The same to read."""
    rows = []
    for method, path, about, body in PATHS:
        rows.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2><p>{html.escape(about)}</p>")
        if body is not None:
            fields = openapi(name)["components"]["schemas"][body.__name__]
            rows.append("<table><tr><th>field</th><th>type</th><th>default</th><th>about</th></tr>")
            rows += [_row(field, about, field in fields["required"]) for field, about in fields["properties"].items()]
            rows.append("</table>")
    style = "body{font:16px sans-serif;max-width:60em;margin:2em auto;padding:0 1em}td,th{text-align:left;padding:.2em 1em .2em 0}"
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>headmax serve</title><style>{style}</style>'
    return f"{head}<h1>{html.escape(name)}</h1>{''.join(rows)}<p><a href=openapi.json>openapi.json</a></p></html>"


def _row(field: str, about: dict[str, Any], required: bool) -> str:
    kinds = [option.get("type", "object") for option in about.get("anyOf", [about])]
    cells = (field, " or ".join(kinds), "required" if required else str(about.get("default", "")), about.get("description", ""))
    return "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
