"""Requests become the tokens that transformers makes of them, with and without a memo."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_tokenizers import TOKENIZERS, make_tokenizer

pytest.importorskip("aiohttp")
pytest.importorskip("jinja2")
transformers = pytest.importorskip("transformers")

from flexcache.router.chooser import Arrival, RouteRequest, Source  # noqa: E402
from flexcache.router.proxy.transfers import with_kv_source  # noqa: E402
from flexcache.router.tokens import Tokenizers, TokenLimits  # noqa: E402
from flexcache.router.tokens.body import CHAT_PATH, COMPLETION_PATH  # noqa: E402

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
WITH_PARTS = {"headers"}
P2P = Source("offloading", "10.0.0.7", 5710)
"""Templates that want content as a list of parts."""


class Reader:
    """Reads requests on a loop of its own."""

    def __init__(self, **arguments: Any) -> None:
        self._loop = asyncio.new_event_loop()

        async def start() -> Tokenizers:
            made = Tokenizers(**arguments)
            await made.start()
            return made

        self.tokenizers = self._loop.run_until_complete(start())

    def read(self, path: str, body: Any, headers: dict[str, str] | None = None) -> RouteRequest:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        arrival = Arrival(request_id="r", method="POST", path=path, headers=headers or {}, body=raw)
        request = self._loop.run_until_complete(self.tokenizers.read(arrival))
        self.tokenizers.check()
        return request

    def ids(self, path: str, **body: Any) -> list[int]:
        """Read a request whose tokens are known, all of them."""
        request = self.read(path, body)
        assert request.token_ids is not None, self.tokenizers.stats().unknown
        assert request.num_tokens == len(request.token_ids)
        return list(map(int, request.token_ids))

    def reasons(self) -> dict[str, int]:
        return self.tokenizers.stats().unknown

    def close(self) -> None:
        self._loop.run_until_complete(self.tokenizers.close())
        self._loop.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="module", params=TOKENIZERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def theirs(directory: Path, name: str) -> Any:
    return transformers.AutoTokenizer.from_pretrained(str(make_tokenizer(directory, name)))


@pytest.fixture(scope="module")
def reader(directory: Path, name: str) -> Iterator[Reader]:
    made = Reader(tokenizer=str(make_tokenizer(directory, name)))
    yield made
    made.close()


@pytest.fixture
def make_reader(directory: Path) -> Iterator[Callable[..., Reader]]:
    readers: list[Reader] = []

    def make(name: str = "chatml", **limits: Any) -> Reader:
        source = str(make_tokenizer(directory, name))
        readers.append(Reader(tokenizer=source, limits=TokenLimits(**limits)))
        return readers[-1]

    yield make
    for made in readers:
        made.close()


PIECES = (
    "<|im_start|>", "<|im_end|>", "<|im_start|>x", "<|im", "|>user", "<|im_", "start|>",
    "<|eot_id|>", "<|start_header_id|>", "<s>", "</s>", "[INST]", " [/INST] ", "<think>", "<r>",
    "<w>", "\ufb01ne", "fine", " ", "  ", "\n", "\n\n", "\t", "\u00a0", "a", "block", " block",
    "cache has", "7", "123", "ü", "数字", "🙂", "\u0301", "{{ x }}", "{% if %}", "\\", '"', "'s",
    "<|begin_of", "<|begin_of_text|>", "▁", "<0x41>", "",
)  # fmt: skip
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=8).map("".join)


@st.composite
def chats(draw: st.DrawFn) -> list[dict[str, str]]:
    turns = draw(st.integers(0, 3))
    roles = ["user", *["assistant", "user"] * turns]
    return [{"role": role, "content": draw(texts)} for role in roles]


def as_engine(name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make the messages what vLLM gives to the template."""
    if name not in WITH_PARTS:
        return messages
    return [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]


@given(messages=chats())
def test_chats_become_the_tokens_of_transformers(
    name: str, theirs: Any, reader: Reader, messages: list[dict[str, str]]
) -> None:
    expected = theirs.apply_chat_template(
        as_engine(name, messages), add_generation_prompt=True, return_dict=False
    )
    assert reader.ids(CHAT, messages=messages) == expected
    assert reader.ids(CHAT, messages=messages) == expected  # from the memo


@given(text=texts.filter(bool), special=st.booleans())
def test_texts_become_the_tokens_of_transformers(
    theirs: Any, reader: Reader, text: str, special: bool
) -> None:
    expected = theirs(text, add_special_tokens=special)["input_ids"]
    assert reader.ids(COMPLETIONS, prompt=text, add_special_tokens=special) == expected
    assert reader.ids(COMPLETIONS, prompt=[text], add_special_tokens=special) == expected


def test_tools_and_template_arguments(make_reader: Callable[..., Reader], directory: Path) -> None:
    reader = make_reader()
    theirs = transformers.AutoTokenizer.from_pretrained(str(directory / "chatml"))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "ü<"}'}}
    messages = [
        {"role": "system", "content": "You are."},
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "done"}]},
    ]
    function = {"name": "f", "description": "Do", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    got = reader.ids(
        CHAT, messages=messages, tools=tools, chat_template_kwargs={"enable_thinking": False}
    )
    messages[2]["content"] = ""
    messages[2]["tool_calls"] = [call | {"function": {"name": "f", "arguments": {"x": "ü<"}}}]
    messages[3]["content"] = "done"
    expected = theirs.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, enable_thinking=False, return_dict=False
    )
    assert got == expected
    assert got != reader.ids(CHAT, messages=[{"role": "user", "content": "Go"}], tools=tools)


@pytest.mark.parametrize("ending", ["", "  \n"])
def test_a_final_message_is_continued(
    make_reader: Callable[..., Reader], directory: Path, ending: str
) -> None:
    reader = make_reader("headers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(directory / "headers"))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"So{ending}"}]
    got = reader.ids(
        CHAT, messages=messages, add_generation_prompt=False, continue_final_message=True
    )
    assert got == theirs.apply_chat_template(
        as_engine("headers", messages), continue_final_message=True, return_dict=False
    )
    both = {"messages": messages, "continue_final_message": True}
    assert reader.read(CHAT, both).token_ids is None


def test_token_ids_are_taken_as_they_are(
    make_reader: Callable[..., Reader], caplog: pytest.LogCaptureFixture
) -> None:
    reader = make_reader()
    ids = list(range(0, 3000, 7))
    assert reader.ids(COMPLETIONS, prompt=ids) == ids
    assert reader.ids(COMPLETIONS, prompt=[ids]) == ids
    request = reader.read(COMPLETIONS, b'{"prompt": [ 1 ,\n 2 ], "n": 4}')
    assert request.token_ids is not None and request.token_ids.tolist() == [1, 2]
    for bad in (
        "[1.5]",
        "[-1]",
        "[4294967296]",
        "[1,]",
        "[1 2]",
        "[[1],[2]]",
        "[]",
        "[[]]",
        "1",
        "[1e3]",
        '[1, 2, "x"]',
        "[true, false]",
    ):
        assert reader.read(COMPLETIONS, b'{"prompt": %s}' % bad.encode()).token_ids is None, bad
    assert "router_request_not_read" not in caplog.text  # no client may fill the log


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 5000}}


@pytest.mark.parametrize("first", [True, False])
def test_a_prompt_with_an_image_is_known_up_to_its_message(
    make_reader: Callable[..., Reader], directory: Path, first: bool
) -> None:
    reader = make_reader("headers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(directory / "headers"))
    text = {"type": "text", "text": "What is it?"}
    content = [IMAGE, text] if first else [text, IMAGE]
    history = [{"role": "user", "content": "Hello " * 20}, {"role": "assistant", "content": "Yes"}]
    request = reader.read(CHAT, {"messages": [*history, {"role": "user", "content": content}]})
    last = [part if part is text else {"type": "image"} for part in content]
    whole = theirs.apply_chat_template(
        [*as_engine("headers", history), {"role": "user", "content": last}],
        add_generation_prompt=True,
        return_dict=False,
    )
    image = theirs.convert_tokens_to_ids("<|image|>")
    assert request.token_ids is not None
    known = request.token_ids.tolist()
    assert known == whole[: len(known)] and image not in known
    before = theirs.apply_chat_template(as_engine("headers", history), return_dict=False)
    assert len(before) <= len(known) <= whole.index(image)
    assert len(known) < request.num_tokens < 1000  # the picture's bytes are not counted


IMAGES_FIRST = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- for part in m.content %}{% if part.type == 'image' %}<image>{% endif %}{% endfor %}
{%- for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}"""
ALL_IMAGES_AT_THE_TOP = (
    """{% for m in messages %}{% for part in m.content %}
{%- if part.type == 'image' %}<|im_end|><image>{% endif %}{% endfor %}{% endfor %}"""
    + IMAGES_FIRST
)


@pytest.mark.parametrize("template", [IMAGES_FIRST, ALL_IMAGES_AT_THE_TOP])
def test_no_placeholder_is_taken_for_text(directory: Path, tmp_path: Path, template: str) -> None:
    source = make_tokenizer(tmp_path, "chatml")
    (source / "chat_template.jinja").write_text(template)
    reader = Reader(tokenizer=str(source))
    theirs = transformers.AutoTokenizer.from_pretrained(str(source))
    messages = [
        {"role": "user", "content": "Look"},
        {"role": "user", "content": [{"type": "text", "text": "at"}, IMAGE]},
        {"role": "user", "content": [{"type": "text", "text": "and"}, IMAGE]},
    ]
    request = reader.read(CHAT, {"messages": messages})
    without = "<|im_start|>user\nLook<|im_end|>\n<|im_start|>"
    if template is IMAGES_FIRST:
        assert request.token_ids is not None
        assert request.token_ids.tolist() == theirs(without)["input_ids"]
    else:
        assert request.token_ids is None and reader.reasons() == {"media": 1}
    reader.close()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"truncate_prompt_tokens": 5}, "truncated"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template"),
        ({"kv_transfer_params": {"prompt_token_ids": [1]}}, "kv_transfer"),
        ({"messages": []}, "no messages"),
        ({"messages": [{"role": "user", "content": [{"type": "strange"}]}]}, "content"),
        ({"messages": [{"role": "user", "content": 7}]}, "content"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": [{"role": 1, "content": "x"}]}, "role"),
        ({"messages": [{"role": "assistant", "tool_calls": [3]}]}, "tool_calls"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"messages": "x"}, "malformed"),
        ({"messages": None}, "malformed"),
    ],
)
def test_prompts_that_are_not_known_go_by_load(
    make_reader: Callable[..., Reader], fields: dict[str, Any], reason: str
) -> None:
    reader = make_reader()
    request = reader.read(CHAT, {"messages": [{"role": "user", "content": "x"}]} | fields)
    assert request.token_ids is None
    assert reader.reasons() == {reason: 1}


def test_texts_in_a_batch_go_by_load(make_reader: Callable[..., Reader]) -> None:
    reader = make_reader()
    for prompt in (["a" * 400, "b" * 400], [[1] * 100, [2] * 100]):
        request = reader.read(COMPLETIONS, {"prompt": prompt})
        assert request.token_ids is None and 150 <= request.num_tokens <= 250
    assert reader.reasons() == {"batch": 2}


@given(
    path=st.sampled_from(
        [CHAT, COMPLETIONS, "/v1/messages", "/v1/responses", "/v1/embeddings", "/x?y=1"]
    ),
    body=st.binary(max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["messages", "role", "content", "type", "text", "tools", "prompt",
                             "function", "model", "arguments", "tool_calls", "user", "input",
                             "system", "source", "output", "thinking", "reasoning", "summary"]),
            inner, max_size=4,
        ),
        max_leaves=12,
    ).map(lambda value: json.dumps(value).encode()),
)  # fmt: skip
def test_no_body_raises(shared: Reader, path: str, body: bytes) -> None:
    request = shared.read(path, body)
    assert request.num_tokens >= 0
    assert "error" not in shared.reasons()


@pytest.fixture(scope="module")
def shared(directory: Path) -> Iterator[Reader]:
    made = Reader(tokenizer=str(make_tokenizer(directory, "chatml")))
    yield made
    made.close()


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m", "messages": 5}',
        b'{"model": "m", "messages": [%s 1]}' % (b"[]," * 60_000),
        b'{"messages": [], "prompt_logprobs": "x", "model": "m"}',
    ],
)
def test_the_model_is_known_of_a_body_that_is_not_read(
    make_reader: Callable[..., Reader], body: bytes
) -> None:
    request = make_reader().read(CHAT, body)
    assert request.token_ids is None
    assert request.model == "m"


def test_hostile_bodies_cost_little(make_reader: Callable[..., Reader]) -> None:
    reader = make_reader(max_body=1 << 20, max_messages=100, max_text=100_000)
    user = {"role": "user", "content": "x"}
    deep = b'{"messages": ' + b"[" * 40_000 + b"]" * 40_000 + b"}"
    nested = (
        b'{"messages": [{"role": "user", "content": "x", "a": '
        + b'{"a":' * 900
        + b"1"
        + b"}" * 900
        + b"}]}"
    )
    bombs = [b"{}," * 60_000, b"[]," * 60_000, b'"",' * 310_000]
    for bomb in bombs:
        body = b'{"messages": [{"role": "user", "content": "x", "a": [%s 1]}]}' % bomb
        assert reader.read(CHAT, body).token_ids is None
    assert reader.reasons() == {"too long": 3}
    for body, reason in (
        (b" " * (1 << 20) + b"1", "too long"),
        ({"messages": [user] * 101}, "too long"),
        ({"messages": [{"role": "user", "content": "y" * 100_001}]}, "too long"),
        (deep, "malformed"),
        (nested, None),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "malformed"),
    ):
        before = reader.reasons()
        request = reader.read(CHAT, body)
        changed = {k for k, v in reader.reasons().items() if v != before.get(k, 0)}
        assert changed == ({reason} if reason else set()), body[:60]
        assert (request.token_ids is None) == (reason is not None)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{{ 'x' * 10000000 }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].nothing.more }}",
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_is_bounded(tmp_path: Path, template: str) -> None:
    source = make_tokenizer(tmp_path, "chatml")
    (source / "chat_template.jinja").write_text(template)
    reader = Reader(tokenizer=str(source))
    assert reader.read(CHAT, {"messages": [{"role": "user", "content": "x"}]}).token_ids is None
    assert reader.reasons().keys() <= {"template", "too long"}
    reader.close()


def test_what_a_request_says_of_itself(make_reader: Callable[..., Reader]) -> None:
    reader = make_reader()
    body = {"prompt": "a b", "cache_salt": "s", "session_id": "in the body", "n": 3}
    request = reader.read(COMPLETIONS + "?x=1", body, {"x-session-id": "in the header"})
    assert (request.cache_salt, request.session_id) == ("s", "in the header")
    assert request.token_ids is not None
    assert reader.read(COMPLETIONS, body).session_id == "in the body"
    other = reader.read("/v1/embeddings", {"input": "x" * 400, "cache_salt": "s"})
    assert (other.token_ids, other.cache_salt) == (None, "s") and other.num_tokens > 90
    nothing = reader.read("/v1/models", b"")
    assert (nothing.token_ids, nothing.num_tokens) == (None, 0)
    assert reader.reasons() == {"path": 1, "no body": 1}


def test_long_texts_are_made_in_threads_and_remembered(make_reader: Callable[..., Reader]) -> None:
    reader = make_reader(threads=2)
    messages = [{"role": "user", "content": f"block {i} " * 3000} for i in range(6)]
    first = reader.ids(CHAT, messages=messages)
    remembered = reader.tokenizers.stats().remembered_tokens
    assert remembered < 100
    assert reader.ids(CHAT, messages=messages) == first
    stats = reader.tokenizers.stats()
    assert stats.remembered_tokens - remembered == len(first)
    assert (stats.tokens, stats.requests["local"]) == (2 * len(first), 2)
    longer = [*messages, {"role": "assistant", "content": "ok"}]
    shared = reader.ids(CHAT, messages=longer)
    assert shared[: len(first) - 10] == first[:-10]


def test_a_memo_without_room_changes_nothing(make_reader: Callable[..., Reader]) -> None:
    reader, other = make_reader(memo_bytes=2000), make_reader()
    for i in range(5):
        messages = [{"role": "user", "content": f"cache {j} has " * 200} for j in range(i, i + 4)]
        assert reader.ids(CHAT, messages=messages) == other.ids(CHAT, messages=messages)
    assert reader.tokenizers.stats().memo_bytes <= 2000


def test_out_of_time_the_known_beginning_has_to_do(make_reader: Callable[..., Reader]) -> None:
    short = [{"role": "user", "content": "x"}]
    start = make_reader().ids(CHAT, messages=short, add_generation_prompt=False)
    reader = make_reader(encode_deadline_s=0.0)
    reader.ids(CHAT, messages=short)
    long = {"role": "user", "content": "block of a prompt " * 20_000}
    request = reader.read(CHAT, {"messages": [*short, long]})
    assert request.token_ids is not None and request.token_ids.tolist() == start
    assert request.num_tokens > 50_000
    assert reader.read(COMPLETIONS, {"prompt": long["content"] + "!"}).token_ids is None
    assert reader.reasons() == {"too slow": 1}


def test_too_much_waiting_goes_by_load(make_reader: Callable[..., Reader]) -> None:
    reader = make_reader(waiting_chars=1000)
    assert reader.read(COMPLETIONS, {"prompt": "x" * 1001}).token_ids is None
    assert reader.reasons() == {"busy": 1}


@pytest.mark.parametrize(
    "body",
    [
        b'{}', b' { "prompt": [1, 2] , "model": "m"}', b'{"messages": [{"kv_transfer_params": 1}]}',
    ],
)  # fmt: skip
def test_a_body_says_where_to_fetch_from_and_all_else_that_it_did(body: bytes) -> None:
    told = {"kv_request_id": "r-1", "remote_host": "10.0.0.7", "remote_port": 5710}
    for path in (CHAT_PATH, f"{COMPLETION_PATH}?x=1"):
        changed = json.loads(with_kv_source(path, body, P2P, "r-1"))
        assert changed.pop("kv_transfer_params") == {"remote_kv_source": told}
        assert changed == json.loads(body)
    assert with_kv_source("/v1/embeddings", body, P2P, "r-1") == body


@pytest.mark.parametrize("ours", ["null", '{"flexcache_pin_ttl_s": 300}'])
def test_hints_for_flexcache_stay_beside_where_to_fetch_from(ours: str) -> None:
    body = f'{{"kv_transfer_params": {ours}, "prompt": [1]}}'.encode()
    changed = json.loads(with_kv_source(CHAT_PATH, body, P2P, "r-1"))
    source = changed["kv_transfer_params"].pop("remote_kv_source")
    assert source["remote_port"] == 5710
    assert changed == {"prompt": [1], "kv_transfer_params": json.loads(ours) or {}}


@pytest.mark.parametrize(
    "body",
    [
        b'{"kv_transfer_params": {"a": 1}}',
        b"[]",
        b"{",
        b"\xff",
        b"",
    ],
)
def test_a_body_that_has_said_it_itself_or_is_none_stays(body: bytes) -> None:
    assert with_kv_source(CHAT_PATH, body, P2P, "r-1") == body
