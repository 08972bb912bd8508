"""A conversation to token ids through the model's chat template.

Templates come with models and are not trusted: they run in Jinja's sandbox, in a process with limits of time and
memory (`templates.py`), and see plain data only. Messages are not trusted either: the text of a control token
inside a message is swapped for one private character before rendering, so no template operation can bring it back,
and is encoded as plain text afterwards. (A template that builds a control token out of a role, such as
'<|' + role + '|>', is the exception: check roles before.)
"""

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jaxinfer.text import templates
from jaxinfer.text.prompts import fails_alone
from jaxinfer.text.templates import ChatTemplateError
from jaxinfer.text.tokenizer import Tokenizer, too_long
from jaxinfer.text.wording import shown

__all__ = ["ChatTemplateError", "render"]

_FIRST_ATOM = 0x100000  # plane 16 of Unicode: private use
_ATOM = re.compile("[\U00100000-\U0010ffff]")
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' tag; its space tells whether the template trims
_NOT_OPTIONS = {"tokenizer", "messages", "max_tokens"}
_RESERVED = {"messages", "tools", "add_generation_prompt"}
CONTENT_FORMATS = ("auto", "string", "openai")
MAX_DEPTH = 100  # of lists and objects inside each other in messages, tools and variables


@fails_alone
def render(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    chat_template_content_format: str = "auto",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    now: datetime | None = None,
    max_tokens: int | None = None,
) -> list[int]:
    """The prompt ids of one conversation, as transformers' `apply_chat_template` on text without control
    tokens.

    messages: dicts with `role` and `content`: text, or a list of {"type": "text", "text": ...} parts, which are
      joined by newlines unless the template walks over them. Arguments of `tool_calls` that are JSON text, as
      OpenAI has them, become the object that templates expect.
    tools: JSON schemas, as the template expects them.
    chat_template: Jinja source instead of the model's own.
    chat_template_content_format: "string" joins the parts of a content, "openai" leaves them, "auto" looks at the
      template.
    chat_template_kwargs: further variables of the template (such as `enable_thinking`).
    add_generation_prompt: open an assistant turn at the end; by default done unless `continue_final_message`.
    continue_final_message: leave the last message open, so that generation continues it.
    now: what the template's `strftime_now` shows (default: the clock), without its time zone. Pin it for
      reproducible prompts.
    max_tokens: refuse a longer prompt, at once where that can be seen at once.

    No BOS is added to what the template writes. Raises ChatTemplateError when the template refuses or fails or
    takes over 2 s or 64 MB, ValueError or TypeError for arguments that no template can take.
    """
    source = _choose_template(tokenizer, chat_template, tools)
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    elif add_generation_prompt and continue_final_message:
        raise ValueError(
            "add_generation_prompt and continue_final_message exclude each other; set one of them"
        )
    if chat_template_content_format not in CONTENT_FORMATS:
        raise ValueError(
            f"chat_template_content_format={shown(chat_template_content_format)} must be one of "
            f"{', '.join(CONTENT_FORMATS)}"
        )
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise ValueError("messages must be a list with at least one message")
    variables = _checked_variables(chat_template_kwargs)

    atoms = _Atoms(tokenizer, source)
    chat = [_checked_message(message, i, atoms) for i, message in enumerate(messages)]
    if continue_final_message:
        _tag_final_message(chat[-1])
    text = templates.run(
        source,
        tokenizer.named_tokens
        | atoms.hide(variables)
        | {
            "messages": chat,
            "tools": atoms.hide(_checked_tools(tools)),
            "documents": atoms.hide(variables.get("documents")),
            "add_generation_prompt": bool(add_generation_prompt),
        },
        now or datetime.now(),
        chat_template_content_format,
    )
    if continue_final_message:
        text = _cut_at_tag(text)
    return _encode(tokenizer, text, atoms, max_tokens)


def known_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `render` that a user gave; None asks for nothing. Raises TypeError for others, naming them."""
    known = [name for name in inspect.signature(render).parameters if name not in _NOT_OPTIONS]
    for name, value in options.items():
        if name not in known and value is not None:
            raise TypeError(f"chat has no option {shown(name)}; it has {', '.join(known)}")
    return {name: value for name, value in options.items() if value is not None}


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

    def hide(self, value: Any, *, only_special: bool = False, depth: int = 0) -> Any:
        """A copy of plain data, control tokens in all strings hidden. Raises TypeError for other data."""
        if isinstance(value, str):
            return (self.special if only_special else self.control).sub(self._atom, value)
        if value is None or isinstance(value, bool | int | float):
            return value
        if depth > MAX_DEPTH:
            raise ValueError(f"a message, tool or variable nests lists and objects over {MAX_DEPTH} deep")

        def hide(item: Any) -> Any:
            return self.hide(item, only_special=only_special, depth=depth + 1)

        if isinstance(value, Mapping):
            return {hide(key): hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [hide(item) for item in value]
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
        if not isinstance(chat_template, str):
            raise TypeError(f"chat_template is the source of a Jinja template, not {shown(chat_template)}")
        return chat_template
    name = "tool_use" if tools is not None and "tool_use" in tokenizer.chat_templates else "default"
    if name not in tokenizer.chat_templates:
        raise ValueError(
            "this model has no chat template; pass chat_template, or use generate with a plain prompt"
        )
    return tokenizer.chat_templates[name]


def _checked_message(message: object, number: int, atoms: _Atoms) -> dict[str, Any]:
    """A message as templates expect it: OpenAI's form translated, control tokens hidden."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TypeError(f"a chat message is a dict with a 'role'; message {number} is {shown(message)}")
    content = message.get("content")
    for part in content if isinstance(content, list | tuple) else ():
        _check_part(part, f"message {number}")
    # Keys set to None are dropped, as in transformers: templates print them or fail on them.
    given = {key: value for key, value in message.items() if value is not None}
    if isinstance(given.get("tool_calls"), list | tuple):
        given["tool_calls"] = [
            _with_parsed_arguments(call, f"message {number}: tool_calls[{i}]")
            for i, call in enumerate(given["tool_calls"])
        ]
    return atoms.hide(given, only_special=message["role"] == "assistant")


def _check_part(part: object, place: str) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind is None:
        raise ValueError(
            f"{place}: a content part must be {{'type': 'text', 'text': ...}}, not {shown(part)}"
        )
    if kind != "text":
        raise ValueError(f"{place}: a content part of type {shown(kind)} cannot be read here, only 'text'")
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        raise ValueError(f"{place}: the 'text' of a content part must be text")


def _with_parsed_arguments(call: Any, place: str) -> Any:
    """A tool call whose `arguments` are an object. OpenAI's messages have them as JSON text."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_parsed_arguments(call["function"], f"{place}.function")}
    text = call.get("arguments")
    if not isinstance(text, str):
        return call
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f"{place}.arguments must be an object, or JSON text of one, not {shown(text)}")
    return {**call, "arguments": arguments}


def _checked_variables(variables: Mapping[str, Any] | None) -> dict[str, Any]:
    if variables is not None and not isinstance(variables, Mapping):
        raise TypeError(f"chat_template_kwargs is an object of variables, not {shown(variables)}")
    given = dict(variables or {})
    if clash := sorted(_RESERVED & given.keys()):
        raise ValueError(f"chat_template_kwargs must not hold {clash[0]!r}; it is an argument of its own")
    return given


def _checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, Sequence):
        raise TypeError(f"tools is a list of dicts (JSON schemas), not {shown(tools)}")
    for tool in tools:
        if not isinstance(tool, Mapping):
            raise TypeError(f"a tool is a dict (JSON schema), not {shown(tool)}")
    return list(tools)


def _tag_final_message(message: dict[str, Any]) -> None:
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


def _encode(tokenizer: Tokenizer, text: str, atoms: _Atoms, max_tokens: int | None) -> list[int]:
    """The ids of a rendered chat: the template's control tokens are tokens, those in atoms are text."""
    ids: list[int] = []
    start = 0
    for match in _ATOM.finditer(text):
        ids += _encode_piece(tokenizer, text[start : match.start()], start == 0, max_tokens)
        hidden = atoms.texts[ord(match[0]) - _FIRST_ATOM]
        ids += _encode_piece(tokenizer, hidden, match.start() == 0, None, plain=True)
        if max_tokens is not None and len(ids) > max_tokens:
            raise too_long(len(text), max_tokens)
        start = match.end()
    ids += _encode_piece(tokenizer, text[start:], start == 0, max_tokens)

    # A tokenizer that normalizes text, or merges it to a special token, could still make one out of it.
    written = sum(not _ATOM.match(match[0]) for match in atoms.control.finditer(text))
    if sum(id_ in atoms.control_ids for id_ in ids) > written:
        raise ValueError("a message holds text that this tokenizer turns into a control token; remove it")
    return ids


def _encode_piece(
    tokenizer: Tokenizer, text: str, first: bool, max_tokens: int | None, *, plain: bool = False
) -> list[int]:
    """The ids of a part of the chat; one that is not the first gets no prefix space."""
    if not text:
        return []

    def encode(part: str) -> list[int]:
        if plain:
            return tokenizer.encode_plain(part)
        return tokenizer.encode(part, add_special_tokens=False, max_tokens=max_tokens)

    if first:
        return encode(text)
    newline = encode("\n")
    ids = encode("\n" + text)
    return ids[len(newline) :] if ids[: len(newline)] == newline else encode(text)
