"""``python-docs``: question and answer chats made from the docstrings of the installed standard library.

Source files are parsed, never imported: importing every module of a Python installation would run code with side
effects. Only three modules written in C, whose docstrings exist nowhere else, are read from memory. Content and order
depend on the Python version alone.
"""

from __future__ import annotations

import ast
import json
import platform
import sys
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import DataError
from ..events import Cancel, Progress, ProgressCallback
from .cache import cache_dir, locked

NAME = "python-docs"

# Raised whenever rows change, so that an old cache file is not used.
FORMAT = 1
# Shorter docstrings say next to nothing; longer ones are cut at a paragraph, so that most rows fit into 512 tokens.
MIN_DOC_CHARS = 40
MAX_DOC_CHARS = 1200

# Not documentation of the library: tests, editors, converters, bundled data, jokes.
SKIPPED_MODULES = frozenset(
    {
        "antigravity",
        "distutils",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "test",
        "tests",
        "this",
        "tkinter",
        "turtledemo",
    }
)
MODULES_IN_C = ("builtins", "itertools", "math")

QUESTIONS = (
    "What does `{name}` do in Python?",
    "Explain `{name}` from Python's standard library.",
    "How does `{name}` work?",
    "Describe the Python {kind} `{name}`.",
)


@dataclass(frozen=True, slots=True)
class DocEntry:
    """One documented thing: dotted name, kind (``"function"``, ``"class"``, ``"method"``), signature and docstring."""

    name: str
    kind: str
    signature: str
    doc: str

    def as_row(self) -> dict[str, object]:
        """Return the chat of this entry. The same name always gets the same form of question."""
        question = QUESTIONS[zlib.crc32(self.name.encode()) % len(QUESTIONS)].format(name=self.name, kind=self.kind)
        answer = f"```python\n{self.signature}\n```\n\n{_shortened(self.doc)}"
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return {"name": self.name, "messages": messages}


def prepare(*, progress: ProgressCallback | None = None, cancel: Cancel | None = None) -> Path:
    """Return the JSONL file of all rows, writing it into the user cache the first time (seconds).

    Raises:
        DataError: The standard library has no source files here, or the cache cannot be written.
        Cancelled: The user cancelled.
    """
    path = cache_dir() / "data" / f"{NAME}-{FORMAT}-py{platform.python_version()}.jsonl"
    if path.is_file():
        return path
    try:
        with locked(path, cancel=cancel):
            if path.is_file():
                return path
            partial = path.with_suffix(".partial")
            count = 0
            with partial.open("w", encoding="utf-8") as file:
                for entry in collect_entries(progress=progress, cancel=cancel):
                    file.write(json.dumps(entry.as_row(), ensure_ascii=False) + "\n")
                    count += 1
            if not count:
                partial.unlink()
                raise DataError("This Python has no source files of its standard library. Choose a data file instead.")
            partial.replace(path)
    except OSError as error:
        raise DataError(
            f"{path.parent} cannot be written ({error.strerror or error}). "
            "Free some space, or set WORKBENCH_CACHE to a folder that can be written."
        ) from error
    return path


def collect_entries(
    modules: Iterable[str] | None = None, *, progress: ProgressCallback | None = None, cancel: Cancel | None = None
) -> Iterator[DocEntry]:
    """Yield the documented functions, classes and methods of ``modules`` (all of the standard library when None).

    Texts that occur more than once (inherited or delegating methods) are yielded once.
    """
    names = (
        sorted(name for name in sys.stdlib_module_names if not name.startswith("_"))
        if modules is None
        else list(modules)
    )
    names = [name for name in names if name not in SKIPPED_MODULES]
    seen: set[str] = set()
    for done, name in enumerate(names):
        if cancel is not None:
            cancel.check()
        if progress is not None:
            progress(Progress("tokenize", done, len(names), "Reading Python's docstrings"))
        for entry in _module_entries(name):
            if len(entry.doc) >= MIN_DOC_CHARS and entry.doc not in seen:
                seen.add(entry.doc)
                yield entry


def read_texts(modules: Iterable[str]) -> Iterator[str]:
    """Yield signature and docstring of each entry of ``modules`` as plain text."""
    for entry in collect_entries(modules):
        yield f"{entry.signature}\n{entry.doc}\n"


def _module_entries(name: str) -> Iterator[DocEntry]:
    if name in MODULES_IN_C:
        yield from _entries_in_memory(name)
        return
    root = Path(sysconfig.get_path("stdlib"))
    single = root / f"{name}.py"
    files = [(name, single)] if single.is_file() else _package_files(name, root / name)
    for module, path in files:
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # a file that this Python cannot read documents nothing
        yield from _entries_in_tree(module, tree)


def _package_files(name: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield ``(dotted module, file)`` of the public modules of a package, in order of their names."""
    if not (folder / "__init__.py").is_file():
        return
    for path in sorted(folder.rglob("*.py")):
        parts = list(path.relative_to(folder).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        if not any(part.startswith("_") or part in SKIPPED_MODULES for part in parts):
            yield ".".join([name, *parts]), path


def _entries_in_tree(module: str, tree: ast.Module) -> Iterator[DocEntry]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _function_entry(f"{module}.{node.name}", "function", node)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            doc = ast.get_docstring(node)
            if doc:
                bases = ", ".join(ast.unparse(base) for base in node.bases)
                signature = f"class {node.name}({bases})" if bases else f"class {node.name}"
                yield DocEntry(f"{module}.{node.name}", "class", signature, doc)
            for item in node.body:
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield from _function_entry(f"{module}.{node.name}.{item.name}", "method", item)


def _function_entry(name: str, kind: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[DocEntry]:
    doc = ast.get_docstring(node)
    if doc and not node.name.startswith("_"):
        word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        yield DocEntry(name, kind, f"{word} {node.name}({ast.unparse(node.args)}){returns}", doc)


def _entries_in_memory(name: str) -> Iterator[DocEntry]:
    """Yield the entries of a module written in C, which every Python has loaded or loads without side effects."""
    import importlib
    import inspect

    module = importlib.import_module(name)
    for attribute, value in sorted(vars(module).items()):
        if attribute.startswith("_") or not callable(value) or not getattr(value, "__doc__", None):
            continue
        dotted = attribute if name == "builtins" else f"{name}.{attribute}"
        is_class = isinstance(value, type)
        signature = getattr(value, "__text_signature__", None) or "(...)"
        head = f"class {attribute}" if is_class else f"def {attribute}{signature}"
        yield DocEntry(dotted, "class" if is_class else "function", head, inspect.cleandoc(value.__doc__))
        if is_class and name == "builtins" and not issubclass(value, BaseException):
            for method, function in sorted(vars(value).items()):
                doc = getattr(function, "__doc__", None)
                if callable(function) and doc and not method.startswith("_"):
                    arguments = getattr(function, "__text_signature__", None) or "(...)"
                    yield DocEntry(f"{dotted}.{method}", "method", f"def {method}{arguments}", inspect.cleandoc(doc))


def _shortened(doc: str) -> str:
    """Return ``doc``, cut after the last whole paragraph (or line) within MAX_DOC_CHARS."""
    if len(doc) <= MAX_DOC_CHARS:
        return doc
    head = doc[:MAX_DOC_CHARS]
    for border in ("\n\n", "\n", " "):
        cut = head.rfind(border)
        if cut >= MIN_DOC_CHARS:
            return head[:cut].rstrip()
    return head
