"""Chat templates and messages of unknown origin: an error of one sentence, in bounded time and memory."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime
from typing import Any

import psutil
import pytest
import text_fixtures as fixtures
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxinfer.text import chat, template_worker, templates
from jaxinfer.text.tokenizer import Tokenizer, load_tokenizer

NOW = datetime(2025, 3, 9)
USER = [{"role": "user", "content": "Where is the inn?"}]
# On a busy machine a process gets a part of a processor, and starts late. The limit itself is of CPU time.
SLACK_SECONDS = 20.0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("byte_level")
    return load_tokenizer(fixtures.save(folder, fixtures.byte_level(), fixtures.BYTE_LEVEL_CONFIG))


def worker() -> psutil.Process:
    """The process that renders; started if there is none."""
    templates.run("x", {"messages": []}, NOW)
    assert templates._worker._process is not None
    return psutil.Process(templates._worker._process.pid)


# Each is one way to work without end, or to make a value that fills the memory.
ATTACKS = {
    "str multiplied": "{{ ('x' * 700000000)|length }}",
    "str multiplied more": "{{ 'a' * 10**10 }}",
    "str doubled": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "str doubled by ~": "{% set ns = namespace(x='a') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "list multiplied": "{{ ([0] * 10**10)|length }}",
    "tuple multiplied": "{{ ((1, 2) * 10**9)|length }}",
    "list of lists": "{% set ns = namespace(x=[0]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "dict of dicts printed": "{% set ns = namespace(x={}) %}{% for i in range(60) %}"
    "{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x | string | length }}",
    "dict of dicts as JSON": "{% set ns = namespace(x={}) %}{% for i in range(60) %}"
    "{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x | tojson | length }}",
    "dict of dicts pretty": "{% set ns = namespace(x={}) %}{% for i in range(60) %}"
    "{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x | pprint | length }}",
    "nested tuples compared": "{% set ns = namespace(x=(), y=()) %}{% for i in range(60) %}"
    "{% set ns.x = (ns.x, ns.x) %}{% set ns.y = (ns.y, ns.y) %}{% endfor %}{{ ns.x == ns.y }}",
    "nested tuples hashed": "{% set ns = namespace(x=()) %}{% for i in range(60) %}"
    "{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {ns.x: 1}|length }}",
    "printf": "{{ '%1000000000d' % 1 }}",
    "printf of a float": "{{ '%.999999999f' % 1 }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "format method": "{{ '{:1000000000d}'.format(1) }}",
    "format of nested widths": "{{ '{:{}d}'.format(1, 10**9) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "rjust": "{{ 'a'.rjust(10**9)|length }}",
    "center method": "{{ 'a'.center(10**9)|length }}",
    "center filter": "{{ 'a'|center(10**9)|length }}",
    "zfill": "{{ '1'.zfill(10**9)|length }}",
    "expandtabs": "{{ '\\t'.expandtabs(10**9)|length }}",
    "replace": "{{ ('a' * 10000).replace('a', 'b' * 100000)|length }}",
    "replace filter": "{{ ('a' * 10000)|replace('a', 'b' * 100000)|length }}",
    "replace of nothing": "{{ ('a' * 10000).replace('', 'b' * 100000)|length }}",
    "join": "{{ ('a' * 10000).join('b' * 10000)|length }}",
    "join filter": "{{ range(100000)|join('b' * 10000)|length }}",
    "translate": "{{ ('a' * 10000).translate({97: 'b' * 100000})|length }}",
    "indent": "{{ ('a\\n' * 10000)|indent(100000)|length }}",
    "wordwrap": "{{ ('a ' * 10000)|wordwrap(1, wrapstring='b' * 100000)|length }}",
    "batch": "{{ [1]|batch(10**10, 0)|list|length }}",
    "slice": "{{ [1]|slice(10**10)|list|length }}",
    "lipsum": "{{ lipsum(n=10**9)|length }}",
    "tojson indent": "{{ [[1]]|tojson(indent=10**10) }}",
    "encode": "{{ ('a' * 10**7).encode('utf-32') * 1000 }}",
    "power": "{{ (10**(10**9)) % 7 }}",
    "power of a power": "{{ 9 ** (9 ** 9) }}",
    "int doubled": "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "int printed": "{{ 10**4000000 }}",
    "int parsed": "{{ ('9' * 10**8)|int }}",
    "nested ranges": "{% for i in range(20000) %}{% for j in range(20000) %}{% endfor %}{% endfor %}",
    "ranges that print": "{% for i in range(20000) %}{% for j in range(20000) %}x{% endfor %}{% endfor %}",
    "sum of ranges": "{% for i in range(100000) %}{{ range(100000)|sum }}{% endfor %}",
    "sort": "{% for i in range(100000) %}{% if range(100000)|sort|length %}{% endif %}{% endfor %}",
    "one macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macros doubled": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for i in [[1]] recursive %}{{ loop([i]) }}{% endfor %}",
    "recursive loop doubled": "{% for i in [60] recursive %}{% if i %}"
    "{{ loop([i - 1, i - 1]) }}{% endif %}{% endfor %}",
    "caller": "{% macro f() %}{% call f() %}{% endcall %}{% endmacro %}{{ f() }}",
    "cycler": "{% set c = cycler(1) %}{% for i in range(100000) %}{% for j in range(100000) %}"
    "{{ c.next() }}{% endfor %}{% endfor %}",
    "urlize": "{{ ('http://a.b ' * 1000000)|urlize|length }}",
    "striptags": "{{ ('<' * 30000000)|striptags|length }}",
    "text kept": "{{ 'a' * 30000000 }}",
    "strftime": "{{ strftime_now('%Y' * 100000000) }}",
    "raised": "{{ raise_exception('a' * 10**10) }}",
    "raised, long": "{{ raise_exception('a' * 10**6) }}",
    "raised, a number": "{{ raise_exception(10**5000) }}",
    "parentheses": "{{" + "(" * 100_000 + "}}",
    "lists in lists": "{{" + "[" * 3000 + "]" * 3000 + "}}",
    "minuses": "{{" + "-" * 100_000 + "1}}",
    "ifs": "{% if x %}" * 3000 + "{% endif %}" * 3000,
    "loops": "{% for x in [1, 2] %}" * 40 + "{% endfor %}" * 40,
    "filters": "{{ 1" + "|string" * 100_000 + "}}",
    "sums": "{{ 1" + " + 1" * 100_000 + "}}",
}


@pytest.mark.parametrize("template", ATTACKS.values(), ids=ATTACKS.keys())
def test_an_attack_is_an_error_in_bounded_time_and_memory(template: str, tokenizer: Tokenizer) -> None:
    process = worker()
    allowed = process.memory_info().vms + template_worker.MAX_BYTES + (1 << 20) + 64 * len(template)
    most = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.01):
            try:
                most = max(most, process.memory_info().vms)
            except psutil.NoSuchProcess:
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.monotonic()
    try:
        with pytest.raises(chat.ChatTemplateError) as raised:
            chat.render(tokenizer, USER, chat_template=template)
    finally:
        done.set()
        watcher.join()
    assert time.monotonic() - started < template_worker.MAX_CPU_SECONDS + SLACK_SECONDS
    assert most < allowed
    assert 0 < len(str(raised.value)) < 400
    # The next conversation is none the worse for it.
    assert chat.render(tokenizer, USER, chat_template="{{ messages[0].content }}")


def test_a_long_honest_conversation_is_none_of_them(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": f"{i} " + "the inn " * 100} for i in range(2_000)]
    template = fixtures.TEMPLATES["tools_and_thinking"]
    text = templates.run(template, {"messages": messages}, NOW)
    assert text.count("<|im_start|>user") == 2_000


def test_one_process_serves_many_conversations() -> None:
    before = worker().pid
    for i in range(300):
        template = "{{ messages[0].content }}" + " " * (i % 100)
        assert templates.run(template, {"messages": [{"content": str(i)}]}, NOW).strip() == str(i)
    process = worker()
    assert process.pid == before
    assert process.memory_info().rss < 100 << 20


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_somebody_ended_is_started_anew(signal_: int) -> None:
    process = worker()
    process.send_signal(signal_)
    process.wait(10)
    assert templates.run("again", {"messages": []}, NOW) == "again"


def test_after_ctrl_c_nobody_gets_the_answer_to_another() -> None:
    worker()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            templates.run(ATTACKS["nested ranges"], {"messages": []}, NOW)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert templates.run("mine", {"messages": []}, NOW) == "mine"


def test_threads_get_their_own_answers() -> None:
    answers: list[str] = []

    def ask(name: str) -> None:
        for i in range(50):
            text = templates.run("{{ messages[0].content }}", {"messages": [{"content": f"{name}{i}"}]}, NOW)
            answers.append(f"{name}{i}" if text == f"{name}{i}" else f"{text} for {name}{i}")

    threads = [threading.Thread(target=ask, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == sorted(f"{name}{i}" for name in "abcd" for i in range(50))


def test_a_fork_has_a_process_of_its_own() -> None:
    before = worker().pid
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            templates.run("x", {"messages": []}, NOW)
            process = templates._worker._process
            os.write(write, str(process.pid if process else 0).encode())
            templates._worker.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(read, 100)) not in (0, before)
    os.close(read)
    os.close(write)
    assert worker().pid == before


def test_the_process_ends_with_ours() -> None:
    program = (
        "from datetime import datetime; from jaxinfer.text import templates; "
        "templates.run('x', dict(messages=[]), datetime.now()); "
        "print(templates._worker._process.pid, flush=True); "
        "import os, signal; os.kill(os.getpid(), signal.{})"
    )
    for ending in ("SIGKILL", "SIGTERM"):
        found = subprocess.run(
            [sys.executable, "-c", program.format(ending)], stdout=subprocess.PIPE, check=False
        )
        pid = int(found.stdout)
        deadline = time.monotonic() + SLACK_SECONDS
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the process outlives its parent"
            time.sleep(0.05)


def nested(depth: int) -> Any:
    value: Any = "x"
    for i in range(depth):
        value = [value] if i % 2 else {"a": value}
    return value


@pytest.mark.parametrize("depth", [101, 3_000, 100_000])
def test_deep_nesting_is_one_sentence(depth: int, tokenizer: Tokenizer) -> None:
    deep = nested(depth)
    render = {"chat_template": fixtures.TEMPLATES["chatml"]}
    for messages, options in [
        ([{"role": "user", "content": "a", "name": deep}], {}),
        ([{"role": "user", "content": deep}], {}),
        ([{"role": deep, "content": "a"}], {}),
        ([deep], {}),
        (USER, {"tools": [{"type": deep}]}),
        (USER, {"tools": [deep]}),
        (USER, {"chat_template_kwargs": {"a": deep}}),
        (USER, {"chat_template_kwargs": deep}),
    ]:
        if messages == [deep] and isinstance(deep, dict) and "role" in deep:
            continue
        try:
            chat.render(tokenizer, messages, **render, **options)  # type: ignore[arg-type]
        except (ValueError, TypeError) as error:
            assert len(str(error)) < 300, error
        else:
            assert depth < 3_000 or options.get("chat_template_kwargs") is deep, (
                messages is USER,
                options.keys(),
            )


# Random programs, mutations of templates, and random messages

NAMES = [
    "messages",
    "message",
    "messages[0].content",
    "ns.x",
    "loop.index",
    "tools",
    "bos_token",
    "'ab'",
    "'é\\n'",
]
VALUES = st.sampled_from(
    [*NAMES, "0", "-1", "3", "100000", "1e308", "none", "true", "[]", "{}", "undefined.x"]
)
OPERATORS = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and", "or", "is"]
FILTERS = [
    "abs",
    "attr",
    "batch",
    "center",
    "default",
    "dictsort",
    "escape",
    "first",
    "float",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "pprint",
    "random",
    "reject",
    "replace",
    "reverse",
    "round",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "striptags",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
    "urlize",
    "wordcount",
    "wordwrap",
    "xmlattr",
]
METHODS = [
    "split",
    "join",
    "format",
    "ljust",
    "zfill",
    "replace",
    "strip",
    "get",
    "items",
    "keys",
    "encode",
    "mro",
]
EXPRESSIONS = st.recursive(
    VALUES,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(OPERATORS), inner).map(lambda x: f"({x[0]} {x[1]} {x[2]})"),
        st.tuples(inner, st.sampled_from(FILTERS)).map("|".join),
        st.tuples(inner, st.sampled_from(FILTERS), inner).map(lambda x: f"{x[0]}|{x[1]}({x[2]})"),
        st.tuples(inner, st.sampled_from(METHODS), inner).map(lambda x: f"({x[0]}).{x[1]}({x[2]})"),
        st.tuples(inner, inner).map(lambda x: f"({x[0]})[{x[1]}]"),
        st.tuples(inner, inner).map(lambda x: f"[{x[0]}, {x[1]}]"),
        st.tuples(inner, inner, inner).map(lambda x: f"({x[0]} if {x[1]} else {x[2]})"),
        inner.map(lambda x: f"range({x})"),
    ),
    max_leaves=6,
)
PROGRAMS = st.recursive(
    st.one_of(
        EXPRESSIONS.map(lambda x: f"{{{{ {x} }}}}"),
        st.sampled_from(["<|im_end|>", "text\n", "{%", "{{ }}", "{#"]),
    ),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(EXPRESSIONS, inner).map(lambda x: f"{{% for message in {x[0]} %}}{x[1]}{{% endfor %}}"),
        st.tuples(EXPRESSIONS, inner).map(lambda x: f"{{% if {x[0]} %}}{x[1]}{{% endif %}}"),
        EXPRESSIONS.map(lambda x: f"{{% set ns = namespace(x={x}) %}}"),
        EXPRESSIONS.map(lambda x: f"{{% set ns.x = {x} %}}"),
        inner.map(lambda x: f"{{% macro f(a) %}}{x}{{{{ f(a) }}}}{{% endmacro %}}{{{{ f(1) }}}}"),
    ),
    max_leaves=6,
)
PLAIN = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.just(None).map(lambda _: 10**5000),
        st.floats(),
        st.text(max_size=20),
        st.sampled_from(["<|im_end|>", "\ud83d", "\U00100000", "x" * 10_000]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "arguments"]), inner
        ),
    ),
    max_leaves=10,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.one_of(st.sampled_from(["user", "assistant", "system", "tool"]), PLAIN)},
        optional={"content": PLAIN, "tool_calls": PLAIN, "name": PLAIN, "reasoning_content": PLAIN},
    ),
    max_size=3,
)
FUZZ = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def renders_or_refuses(tokenizer: Tokenizer, messages: Any, **options: Any) -> None:
    started = time.monotonic()
    try:
        ids = chat.render(tokenizer, messages, now=NOW, **options)
    except (ValueError, TypeError) as error:
        assert len(str(error)) < 600
    else:
        assert all(0 <= id_ < tokenizer.vocab_size for id_ in ids)
    assert time.monotonic() - started < template_worker.MAX_CPU_SECONDS + SLACK_SECONDS


@FUZZ
@given(PROGRAMS)
def test_random_templates(tokenizer: Tokenizer, template: str) -> None:
    renders_or_refuses(tokenizer, USER, chat_template=template)


@FUZZ
@given(st.sampled_from(sorted(fixtures.TEMPLATES)), st.randoms(use_true_random=False))
def test_damaged_templates(tokenizer: Tokenizer, name: str, draw: random.Random) -> None:
    """Pieces of a template are removed, doubled, swapped with pieces of others, or given another character."""
    text = fixtures.TEMPLATES[name]
    for _ in range(draw.randint(1, 4)):
        start = draw.randrange(len(text))
        end = min(len(text), start + draw.randint(1, 30))
        other = draw.choice(sorted(fixtures.TEMPLATES.values()))
        place = draw.randrange(len(other))
        new = draw.choice(
            ["", text[start:end] * 2, other[place : place + 30], chr(draw.randrange(0x250)), "10**9"]
        )
        text = text[:start] + new + text[end:] or "x"
    conversation = draw.choice(sorted(fixtures.CONVERSATIONS))
    renders_or_refuses(tokenizer, fixtures.CONVERSATIONS[conversation], chat_template=text)


@FUZZ
@given(st.one_of(MESSAGES, PLAIN), st.one_of(st.none(), PLAIN), st.one_of(st.none(), PLAIN), st.booleans())
def test_random_messages(
    tokenizer: Tokenizer, messages: Any, tools: Any, variables: Any, continued: bool
) -> None:
    for name in ("tools_and_thinking", "parts"):
        renders_or_refuses(
            tokenizer,
            messages,
            tools=tools,
            chat_template_kwargs=variables,
            continue_final_message=continued,
            chat_template=fixtures.TEMPLATES[name],
        )
