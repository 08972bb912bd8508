"""Renders chat templates in a process of its own, whose time and memory the kernel bounds.

A template is a program of unknown origin. Jinja's sandbox keeps it away from Python's insides, not from work
without end: `'a' * 10**10` and `10 ** 10 ** 9` are single operations that nothing in the same process could stop.
Here an alarm on the time of the processor ends the process, and the kernel refuses memory over the limit.

`templates.py` starts `main` and speaks with it. This module imports Jinja and the standard library alone, so that
the process starts in a tenth of a second.
"""

import json
import marshal
import re
import resource
import signal
import sys
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

MAX_CPU_SECONDS = 2.0
MAX_BYTES = (
    64 << 20
)  # beyond what the process has before, and `BYTES_PER_INPUT_BYTE` for each byte of the request
BYTES_PER_INPUT_BYTE = 16  # its decoded form, the form that the template made of it, and the text
MAX_TEXT_CHARS = 1 << 20  # of the rendered text, and `CHARS_PER_INPUT_BYTE` for each byte of the request
CHARS_PER_INPUT_BYTE = 4
MAX_ERROR_CHARS = 300  # of a message that the template chose

TEXT, REFUSED, OVER_LIMIT = b"t", b"e", b"m"  # the first byte of an answer; the rest is UTF-8


def main(descriptor: int) -> None:
    """Answers requests on a socket until its other end is closed, or until memory was short."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(limit, (0, 0))
    connection = Connection(descriptor)
    most_bytes = _address_space() + MAX_BYTES
    while _address_space() < most_bytes:  # else a fresh process does better
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        answer = answer_to(request)
        connection.send_bytes(answer)
        if answer[:1] == OVER_LIMIT:
            return


def answer_to(request: bytes) -> bytes:
    """Renders one request, a marshalled (template, variables, ISO date, format), under the limits."""
    _limit_memory(_address_space() + MAX_BYTES + BYTES_PER_INPUT_BYTE * len(request))
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_SECONDS)
    try:
        template, variables, now, content_format = marshal.loads(request)
        text = render(template, variables, datetime.fromisoformat(now), content_format)
        most = MAX_TEXT_CHARS + CHARS_PER_INPUT_BYTE * len(request)
        if len(text) > most:
            return OVER_LIMIT + f"it wrote {len(text)} characters, over the limit of {most}".encode()
        return TEXT + text.encode("utf-8", "surrogatepass")
    except MemoryError:
        pass  # what it held is freed first
    except jinja2.TemplateError as error:
        return REFUSED + _brief(error.message or type(error).__name__)
    except BaseException as error:
        return REFUSED + b"the chat template failed: " + _brief(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        _limit_memory(resource.RLIM_INFINITY)
    return OVER_LIMIT + f"it needs over {MAX_BYTES >> 20} MB".encode()


def _brief(error: object) -> bytes:
    try:
        text = str(error) or type(error).__name__
    except Exception:  # a message that cannot be printed, such as a huge number
        text = type(error).__name__
    short = text if len(text) <= MAX_ERROR_CHARS else f"{text[:MAX_ERROR_CHARS]}..."
    return short.encode("utf-8", "backslashreplace")


def _address_space() -> int:
    """Bytes of this process's address space; 0 where the kernel does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _limit_memory(num_bytes: int) -> None:
    if sys.platform == "linux":  # elsewhere the limit is not kept by the kernel
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        if hard != resource.RLIM_INFINITY and (num_bytes == resource.RLIM_INFINITY or num_bytes > hard):
            num_bytes = hard
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, hard))


def render(template: str, variables: dict[str, Any], now: datetime, content_format: str) -> str:
    """The text that a template makes of its variables; `messages` are plain data.

    Parts of text are joined by newlines if `content_format` is "string", or "auto" and the template does not
    walk over them.
    """
    program = _compiled(template)
    if content_format == "string" or (content_format == "auto" and not program.handles_parts):
        variables["messages"] = [_with_text(message) for message in variables["messages"]]
    return program.template.render(variables, strftime_now=now.strftime)


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {"content": "\n".join(part["text"] for part in content)}


class _Program(NamedTuple):
    template: jinja2.Template
    handles_parts: bool


@lru_cache(maxsize=32)
def _compiled(source: str) -> _Program:
    environment = _environment()
    return _Program(environment.from_string(source), handles_parts(environment.parse(source)))


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    """The environment that templates on the hub are written for (transformers' chat_template_utils)."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; here its body is simply written."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML. Atoms stay what they are, also when other characters are escaped."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if not ensure_ascii:
        return text
    return re.sub("[^\x00-\x7f\U00100000-\U0010ffff]", lambda match: json.dumps(match[0])[1:-1], text)


# Does a template take content as parts?

_PASSED_ON = {"default", "d", "list", "reverse", "sort", "unique", "select", "reject"}  # parts in, parts out
_READ_PARTS = {"selectattr", "rejectattr", "map", "groupby"}  # filters that look into each part


def handles_parts(tree: jinja2.nodes.Template) -> bool:
    """Whether the template walks over the content of a message, and so expects parts where there are any.

    Content is `message.content`, and every name that it is given to by `set`, `with` or a call of a macro.
    """
    names: set[str] = set()
    while True:  # a name may stand for another
        more = {name for name, value in _assignments(tree) if _is_content(value, names)} - names
        if not more:
            break
        names |= more
    if any(_is_content(loop.iter, names) for loop in tree.find_all(jinja2.nodes.For)):
        return True
    filters = tree.find_all(jinja2.nodes.Filter)
    if any(node.name in _READ_PARTS and _is_content(node.node, names) for node in filters):
        return True
    fields: list[Any] = [*tree.find_all(jinja2.nodes.Getattr), *tree.find_all(jinja2.nodes.Getitem)]
    return any(_key(node) in ("text", "type") and _is_element(node.node, names) for node in fields)


def _assignments(tree: jinja2.nodes.Template) -> Iterator[tuple[str, Any]]:
    """(name, expression) of everything that gives a name a value."""
    for assign in tree.find_all(jinja2.nodes.Assign):
        if isinstance(assign.target, jinja2.nodes.Name):
            yield assign.target.name, assign.node
    for block in tree.find_all(jinja2.nodes.With):
        for target, value in zip(block.targets, block.values, strict=True):
            if isinstance(target, jinja2.nodes.Name):
                yield target.name, value
    macros = {macro.name: macro for macro in tree.find_all(jinja2.nodes.Macro)}
    for call in tree.find_all(jinja2.nodes.Call):
        if isinstance(call.node, jinja2.nodes.Name) and call.node.name in macros:
            parameters = macros[call.node.name].args
            for parameter, value in zip(parameters, call.args, strict=False):
                yield parameter.name, value
            for keyword in call.kwargs:
                yield keyword.key, keyword.value


def _is_content(node: Any, names: set[str]) -> bool:
    """Whether an expression is the content of a message, or a part of that list."""
    nodes = jinja2.nodes
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.CondExpr):
        return _is_content(node.expr1, names) or _is_content(node.expr2, names)
    if isinstance(node, nodes.And | nodes.Or):
        return _is_content(node.left, names) or _is_content(node.right, names)
    if isinstance(node, nodes.Filter):
        return node.name in _PASSED_ON | _READ_PARTS and _is_content(node.node, names)
    if isinstance(node, nodes.Call):  # message.get('content')
        first = node.args[0] if node.args else None
        return _key(node.node) == "get" and isinstance(first, nodes.Const) and first.value == "content"
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is_content(node.node, names)
    return _key(node) == "content"


def _is_element(node: Any, names: set[str]) -> bool:
    """content[0], content | first"""
    if isinstance(node, jinja2.nodes.Filter):
        return node.name in ("first", "last") and _is_content(node.node, names)
    return isinstance(_key(node), int) and _is_content(node.node, names)


def _key(node: Any) -> Any:
    """The constant name or index of `x.name`, `x['name']` or `x[0]`."""
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr
    if isinstance(node, jinja2.nodes.Getitem) and isinstance(node.arg, jinja2.nodes.Const):
        return node.arg.value
    return None
