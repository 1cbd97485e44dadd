"""Data of tasks from local files, converted to the rows that the harness gets from the hub."""

from __future__ import annotations

import io
import lzma
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headmax import durable

Row = dict[str, Any]


def find(folder: Path, *names: str) -> Path:
    """The first of these files, plain or as .xz, in a folder or its subfolders."""
    for name in names:
        for pattern in (name, f"*/{name}"):
            for suffix in ("", ".xz"):
                if paths := sorted(folder.glob(pattern + suffix)):
                    return paths[0]
    raise FileNotFoundError(f"{folder}: no {' or '.join(names)}, plain or as .xz; add it to the folder")


def read_text(path: Path) -> str:
    try:
        return (lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()).decode()
    except (lzma.LZMAError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error


@dataclass(frozen=True)
class Rows:
    """A file with one JSON object per line."""

    names: tuple[str, ...]
    """File names; the first that exists is used."""
    columns: Mapping[str, type]
    convert: Callable[[Row], Row] = dict
    """To the columns that the harness expects."""

    def read(self, path: Path) -> Iterator[Row]:
        for number, line in enumerate(io.StringIO(read_text(path)), 1):
            try:
                row = durable.parse_json(line)
                if not isinstance(row, dict):
                    raise ValueError(f"a row must be a JSON object, got {type(row).__name__}")
                for column, kind in self.columns.items():
                    if column not in row:
                        raise ValueError(f"no column {column!r}, only {', '.join(map(repr, row))}")
                    if not isinstance(row[column], kind):
                        raise ValueError(f"column {column!r} must be {kind.__name__}, got {row[column]!r}")
                yield self.convert(row)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from error


@dataclass(frozen=True)
class Pages:
    """WikiText's original format: one text, in which every article starts with ` = Title = `."""

    names: tuple[str, ...]

    def read(self, path: Path) -> Iterator[Row]:
        page: list[str] = []
        for line in read_text(path).split("\n"):
            heading = line.replace("= = =", "===").replace("= =", "==").strip()
            if heading.startswith("= ") and heading.endswith(" ="):
                if "".join(page).strip():
                    yield {"page": "\n".join(page)}
                page = []
            page.append(line)
        if "".join(page).strip():
            yield {"page": "\n".join(page)}


def _within(name: str, index: int, choices: Iterable[Any]) -> int:
    if not 0 <= index < len(list(choices)):
        raise ValueError(f"column {name!r} must name one of the {len(list(choices))} choices, got {index}")
    return index


def _piqa(row: Row) -> Row:
    return {"goal": row["goal"], "sol1": row["sol1"], "sol2": row["sol2"], "label": _within("label", row["label"], "12")}


def _arc(row: Row) -> Row:
    labels = list(string.ascii_uppercase[: len(row["choices"])])
    gold = _within("gold", row["gold"], labels)
    return {"question": row["question"], "choices": {"text": row["choices"], "label": labels}, "answerKey": labels[gold]}


def _hellaswag(row: Row) -> Row:
    """The file joins both parts of the context unchanged; the harness capitalises the second, a fragment after the last sentence."""
    query, label = row["query"], _within("gold", row["gold"], row["choices"])
    if fragment := re.search(r"(?<=[.!?] )[a-z][^.!?]*$", query):
        query = query[: fragment.start()] + fragment.group().capitalize()
    return {"query": query, "choices": row["choices"], "label": str(label)}


def _winogrande(row: Row) -> Row:
    if "_" not in row["sentence"] or row["answer"] not in ("1", "2"):
        raise ValueError(f"sentence must contain _ and answer must be 1 or 2, got {row['sentence']!r} and {row['answer']!r}")
    return {name: row[name] for name in ("sentence", "option1", "option2", "answer")}


def _lambada(row: Row) -> Row:
    if " " not in row["text"].strip():
        raise ValueError(f"text must have a context and a last word, got {row['text']!r}")
    return {"text": row["text"]}


def _squad(row: Row) -> Row:
    if not row["answers"]:
        raise ValueError("answers must not be empty")
    text = f"{row['context']}\nQuestion: {row['question']}\nAnswer:"
    return {"text": text, "value": row["answers"][0], "answers": row["answers"]}


def _based(row: Row) -> Row:
    if not row["value"].strip():
        raise ValueError("column 'value' must not be empty")
    return {"text": row["text"], "value": row["value"], "answers": [row["value"].strip()]}


BASED: dict[str, type] = {"text": str, "value": str}
ARC: dict[str, type] = {"question": str, "choices": list, "gold": int}

FILES: dict[str, tuple[Rows | Pages, ...]] = {
    "wikitext": (Pages(("wikitext2_raw.test.txt",)),),
    "lambada_openai": (Rows(("lambada_openai.test.jsonl",), {"text": str}, _lambada),),
    "piqa": (Rows(("piqa.valid.jsonl",), {"goal": str, "sol1": str, "sol2": str, "label": int}, _piqa),),
    "hellaswag": (Rows(("hellaswag.val.jsonl",), {"query": str, "choices": list, "gold": int}, _hellaswag),),
    "winogrande": (Rows(("winogrande_xl.dev.jsonl",), {"sentence": str, "option1": str, "option2": str, "answer": str}, _winogrande),),
    "arc_easy": (Rows(("arc_easy.test.jsonl",), ARC, _arc),),
    "arc_challenge": (Rows(("arc_challenge.test.jsonl",), ARC, _arc),),
    "swde": (Rows(("swde.jsonl", "based-swde.jsonl"), BASED, _based),),
    "fda": (Rows(("fda.jsonl", "based-fda.jsonl"), BASED, _based),),
    "squad_completion": (
        Rows(("squad.jsonl", "based-squad.jsonl"), BASED, _based),
        Rows(("squad_subset.jsonl",), {"context": str, "question": str, "answers": list}, _squad),
    ),
}
"""Formats of each task's data; the first file that exists is used."""


def rows(task: str, folder: Path) -> tuple[list[Row], str]:
    """(rows of a task, name of their file)."""
    if not folder.is_dir():
        raise FileNotFoundError(f"--data-dir {folder}: no such folder")
    formats = FILES[task]
    path = find(folder, *(name for form in formats for name in form.names))
    form = next(form for form in formats if path.name.removesuffix(".xz") in form.names)
    content = list(form.read(path))
    if not content:
        raise ValueError(f"{path}: no rows")
    return content, path.name.removesuffix(".xz")
