"""A conversation to token ids through the model's chat template.

Templates come with models and are not trusted: they run in Jinja's sandbox and see plain data only. Messages
are not trusted either: the text of a control token inside a message is swapped for one private character
before rendering, so no template operation can bring it back, and is encoded as plain text afterwards. (A
template that builds a control token out of a role, such as '<|' + role + '|>', is the exception: check roles
before.)
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from jaxinfer.text.tokenizer import Tokenizer

_FIRST_ATOM = 0x100000  # plane 16 of Unicode: private use
_ATOM = re.compile("[\U00100000-\U0010ffff]")
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' tag; its space tells whether the template trims
_RESERVED = {"messages", "tools", "add_generation_prompt"}


class ChatTemplateError(ValueError):
    """The template refused the conversation, or failed on it; the message is the template's own."""


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    now: datetime | None = None,
) -> list[int]:
    """The prompt ids of one conversation, as transformers' `apply_chat_template` on text without control
    tokens.

    messages: dicts with `role` and `content` (text, or a list of {"type": "text", "text": ...} parts).
    tools: JSON schemas, as the template expects them.
    chat_template: Jinja source instead of the model's own.
    chat_template_kwargs: further variables of the template (such as `enable_thinking`).
    add_generation_prompt: open an assistant turn at the end; by default done unless `continue_final_message`.
    continue_final_message: leave the last message open, so that generation continues it.
    now: what the template's `strftime_now` shows (default: the clock). Pin it for reproducible prompts.

    No BOS is added to what the template writes. Raises ChatTemplateError when the template refuses or fails,
    ValueError or TypeError for arguments that no template can take.
    """
    source = _choose_template(tokenizer, chat_template, tools)
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    elif add_generation_prompt and continue_final_message:
        raise ValueError(
            "add_generation_prompt and continue_final_message exclude each other; set one of them"
        )
    if isinstance(messages, Mapping | str) or not messages:
        raise ValueError("messages must be a list with at least one message")
    variables = dict(chat_template_kwargs or {})
    if clash := sorted(_RESERVED & variables.keys()):
        raise ValueError(f"chat_template_kwargs must not hold {clash[0]!r}; it is an argument of its own")

    atoms = _Atoms(tokenizer, source)
    chat = [_checked_message(message, atoms) for message in messages]
    if continue_final_message:
        _tag_final_message(chat[-1], source)
    text = _run(
        source,
        tokenizer.named_tokens
        | atoms.hide(variables)
        | {
            "messages": chat,
            "tools": atoms.hide(_checked_tools(tools)),
            "documents": atoms.hide(variables.get("documents")),
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": lambda format_: (now or datetime.now()).strftime(format_),
        },
    )
    if continue_final_message:
        text = _cut_at_tag(text)
    return _encode(tokenizer, text, atoms)


class _Atoms:
    """Private characters that stand for control tokens written by users.

    Control tokens are the special tokens and those other added tokens that the template itself writes
    (`<think>`). The latter stay as they are in assistant messages, since templates cut the reasoning of
    earlier turns out at them.
    """

    def __init__(self, tokenizer: Tokenizer, template: str):
        added = {token.content: id_ for id_, token in tokenizer.added_tokens.items() if token.content}
        special = [token for token in added if token in tokenizer.special_tokens]
        in_template = [token for token in added if token not in special and token in template]
        self.control = _any_of(special + in_template)
        self.special = _any_of(special)
        self.control_ids = {added[token] for token in special + in_template}
        self._atom_of: dict[str, str] = {}
        self.texts: list[str] = []  # what atom i stands for

    def hide(self, value: Any, *, only_special: bool = False) -> Any:
        """A copy of plain data, control tokens in all strings hidden. Raises TypeError for other data."""
        if isinstance(value, str):
            return (self.special if only_special else self.control).sub(self._atom, value)
        if isinstance(value, Mapping):
            return {
                self.hide(key, only_special=only_special): self.hide(item, only_special=only_special)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.hide(item, only_special=only_special) for item in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        raise TypeError(
            f"chat messages, tools and variables hold plain data only, not {type(value).__name__}"
        )

    def _atom(self, match: re.Match[str]) -> str:
        text = match[0]
        if text not in self._atom_of:
            self._atom_of[text] = chr(_FIRST_ATOM + len(self.texts))
            self.texts.append(text)
        return self._atom_of[text]


def _any_of(tokens: list[str]) -> re.Pattern[str]:
    """Any of the tokens, longest first, or a private character (so that users cannot forge one)."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join([*map(re.escape, longest_first), _ATOM.pattern]))


def _choose_template(tokenizer: Tokenizer, chat_template: str | None, tools: object) -> str:
    if chat_template is not None:
        return chat_template
    name = "tool_use" if tools is not None and "tool_use" in tokenizer.chat_templates else "default"
    if name not in tokenizer.chat_templates:
        raise ValueError(
            "this model has no chat template; pass chat_template, or use generate with a plain prompt"
        )
    return tokenizer.chat_templates[name]


def _checked_message(message: object, atoms: _Atoms) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TypeError(f"a chat message is a dict with a 'role', not {message!r}")
    content = message.get("content")
    for part in content if isinstance(content, list | tuple) else ():
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise ValueError(f"a content part must be {{'type': 'text', 'text': ...}}, not {part!r}")
    # Keys set to None are dropped, as in transformers: templates print them or fail on them.
    given = {key: value for key, value in message.items() if value is not None}
    return atoms.hide(given, only_special=message["role"] == "assistant")


def _checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]] | None:
    if tools is None:
        return None
    for tool in tools:
        if not isinstance(tool, Mapping):
            raise TypeError(f"a tool is a dict (JSON schema), not {tool!r}")
    return list(tools)


def _tag_final_message(message: dict[str, Any], template: str) -> None:
    content = message.get("content")
    if isinstance(content, list) and content:
        content[-1]["text"] += _CONTINUE_TAG
    elif isinstance(content, str):
        message["content"] = content + _CONTINUE_TAG
    else:
        raise ValueError("continue_final_message needs a last message with content")


def _cut_at_tag(text: str) -> str:
    end = text.rfind(_CONTINUE_TAG.strip())
    if end < 0:
        raise ChatTemplateError("continue_final_message: the chat template dropped the last message")
    # A template that trims messages took the tag's own space too, and would take those of the message.
    return text[:end] if text.startswith(_CONTINUE_TAG, end) else text[:end].rstrip()


def _encode(tokenizer: Tokenizer, text: str, atoms: _Atoms) -> list[int]:
    """The ids of a rendered chat: the template's control tokens are tokens, those in atoms are text."""
    ids: list[int] = []
    start = 0
    for match in _ATOM.finditer(text):
        ids += _encode_piece(tokenizer, text[start : match.start()], plain=False, first=start == 0)
        hidden = atoms.texts[ord(match[0]) - _FIRST_ATOM]
        ids += _encode_piece(tokenizer, hidden, plain=True, first=match.start() == 0)
        start = match.end()
    ids += _encode_piece(tokenizer, text[start:], plain=False, first=start == 0)

    # A tokenizer that normalizes text, or merges it to a special token, could still make one out of it.
    written = sum(not _ATOM.match(match[0]) for match in atoms.control.finditer(text))
    if sum(id_ in atoms.control_ids for id_ in ids) > written:
        raise ValueError("a message holds text that this tokenizer turns into a control token; remove it")
    return ids


def _encode_piece(tokenizer: Tokenizer, text: str, *, plain: bool, first: bool) -> list[int]:
    """The ids of a part of the chat; one that is not the first gets no prefix space."""
    if not text:
        return []

    def encode(part: str) -> list[int]:
        return tokenizer.encode_plain(part) if plain else tokenizer.encode(part, add_special_tokens=False)

    if first:
        return encode(text)
    newline = encode("\n")
    ids = encode("\n" + text)
    return ids[len(newline) :] if ids[: len(newline)] == newline else encode(text)


def _run(template: str, variables: dict[str, Any]) -> str:
    try:
        return _compile(template).render(variables)
    except jinja2.TemplateError as error:
        raise ChatTemplateError(error.message or type(error).__name__) from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ChatTemplateError(f"the chat template failed: {error}") from error


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; here its body is simply written."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    """The environment that templates on the hub are written for (transformers' chat_template_utils)."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(template)


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
