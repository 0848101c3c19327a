"""Workers as people list them, and how the router follows the changes."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flexcache.errors import ConfigError
from flexcache.router import discovery
from flexcache.router.discovery import Discovery
from flexcache.router.fleet import EventSource, WorkerSpec
from flexcache.router.listing import Listing, WorkerFile, WorkerUrl, parse_options, parse_table

A, B = "http://10.0.0.7:8000", "http://10.0.0.8:8000"


def names(specs: tuple[WorkerSpec, ...]) -> list[str]:
    return [spec.name for spec in specs]


# -- options --------------------------------------------------------------------------------------


def test_a_worker_without_events_is_its_url() -> None:
    assert parse_options([A + "/"], []).specs() == (WorkerSpec(name=A, url=A),)


def test_events_belong_to_the_worker_that_they_name_and_shared_ones_to_all() -> None:
    listing = parse_options(
        [A, B],
        [f"{A}=tcp://10.0.0.7:5557,tcp://10.0.0.7:5558", "*=tcp://10.0.0.9:5570"],
    )
    shared = EventSource("tcp://10.0.0.9:5570")
    first, second = listing.specs()
    assert first.sources == (EventSource("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558"), shared)
    assert second.sources == (shared,)


def test_caches_belong_to_the_worker_that_they_name_and_a_shared_one_to_the_others() -> None:
    listing = parse_options(
        [A, f"{B},data_parallel_size=2"],
        [],
        [f"{A}=http://10.0.0.7:9470/", "*=http://{host}:9471"],
    )
    assert [spec.cache_url for spec in listing.specs()] == [
        "http://10.0.0.7:9470", "http://10.0.0.8:9471", "http://10.0.0.8:9471",
    ]  # fmt: skip
    table = {
        "workers": [{"url": A}, {"url": B, "cache_url": "https://{host}:9470"}],
        "shared_cache_url": "http://10.0.0.9:9470",
    }
    assert [spec.cache_url for spec in parse_table(table).specs()] == [
        "http://10.0.0.9:9470", "https://10.0.0.8:9470",
    ]  # fmt: skip
    joined = parse_options([A], []).joined(parse_table(table))
    assert [spec.cache_url for spec in joined.specs()] == [
        "http://10.0.0.9:9470", "https://10.0.0.8:9470",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("cache", "problem"),
    [
        ("http://10.0.0.7:9470", "must be URL=CACHE_URL"),
        (f"{B}=http://10.0.0.7:9470", "is no --worker"),
        (f"{A}=tcp://10.0.0.7:9470", "SCHEME://HOST:PORT"),
        (f"{A}=http+dns://caches:9470", "must be http://HOST:PORT"),
        (f"{A}=http://10.0.0.7:9470/cache/prefetch", "must have no path"),
    ],
)
def test_a_malformed_cache_is_refused_by_name(cache: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"--cache.*{re.escape(problem)}"):
        parse_options([A], [], [cache])
    _, _, url = cache.rpartition("=")
    if url != "http://10.0.0.7:9470":
        with pytest.raises(ConfigError, match="cache_url"):
            parse_table({"workers": [{"url": A, "cache_url": url}]})


def test_each_rank_is_a_worker_with_ports_of_its_own_and_a_cache_is_shared() -> None:
    listing = parse_options(
        [f"{A},data_parallel_size=3,peer_port=5710,transfer=offloading,role=decode"],
        [f"{A}=tcp://{{host}}:5557,tcp://{{host}}:5657", f"{A}#*=tcp://10.0.0.7:5570"],
    )
    specs = listing.specs()
    assert names(specs) == [f"{A}#0", f"{A}#1", f"{A}#2"]
    assert {spec.url for spec in specs} == {A}
    assert [spec.data_parallel_rank for spec in specs] == [0, 1, 2]
    for rank, spec in enumerate(specs):
        assert spec.peer_port == 5710 + rank
        assert (spec.role, spec.transfer) == ("decode", "offloading")
        assert spec.sources == (
            EventSource(f"tcp://10.0.0.7:{5557 + rank}", f"tcp://10.0.0.7:{5657 + rank}"),
            EventSource("tcp://10.0.0.7:5570"),
        )


@pytest.mark.parametrize(
    ("workers", "events", "words"),
    [
        (["10.0.0.7:8000"], [], "must be SCHEME://HOST:PORT"),
        (["ftp://10.0.0.7"], [], "must be SCHEME://HOST:PORT"),
        (["http://:8000"], [], "must be SCHEME://HOST:PORT"),
        (["http://h:99999"], [], "--worker"),
        (["http://[::1"], [], "--worker"),
        (["http://user:secret@h:1"], [], "no path, query, fragment or user"),
        ([A + "@evil.example"], [], "--worker"),
        ([A + ".evil.example:80"], [], "--worker"),
        (["file:///etc/passwd"], [], "must be SCHEME://HOST:PORT"),
        (["http://10.0.0.%37:8000"], [], "must be SCHEME://HOST:PORT"),
        ([" " + A], [], "no control characters or spaces"),
        ([A + "/v1"], [], "no path"),
        ([A + "?x=1"], [], "no path"),
        (["http+dns://engines"], [], "needs the port"),
        (["http://h\n:1"], [], "no control characters"),
        (["http://h;i:1"], [], "must be SCHEME://HOST:PORT"),
        ([A], [f"{A}=tcp://h:1;i:2"], "must be ENDPOINT or ENDPOINT,REPLAY"),
        ([A], [f"{A}=tcp://h:1,tcp://h:2;i:3"], "must be ENDPOINT or ENDPOINT,REPLAY"),
        ([A], [f"{A}=tcp://h:1?;i:2"], "must be ENDPOINT or ENDPOINT,REPLAY"),
        ([A], [f"{A}=tcp://*:1"], "must be ENDPOINT or ENDPOINT,REPLAY"),
        ([A, A + "/"], [], "listed twice"),
        ([f"{A},data_parallel_size=0"], [], "data_parallel_size"),
        ([f"{A},peer_port=70000"], [], "peer_port"),
        (
            [f"{A},peer_port=65535,data_parallel_size=2,transfer=offloading"],
            [],
            "leaves no port for the last rank",
        ),
        ([f"{A},ranks=2"], [], r"URL\[,data_parallel_size=N\]\[,role=prefill\|decode\]"),
        ([f"{A},role=helper"], [], "role"),
        ([f"{A},transfer=pigeon"], [], "transfer"),
        ([A], ["tcp://10.0.0.7:5557"], r"must be URL=ENDPOINT\[,REPLAY\]"),
        ([A], [f"{A}=10.0.0.7:5557"], "must be ENDPOINT or ENDPOINT,REPLAY"),
        ([A], [f"{A}=tcp://h:1,tcp://h:2,tcp://h:3"], "must be ENDPOINT or ENDPOINT,REPLAY"),
        ([A], [f"{A}=tcp://h"], "must be ENDPOINT or ENDPOINT,REPLAY"),
        ([A], [f"{B}=tcp://h:1"], "did you mean http://10.0.0.7:8000"),
        ([f"{A},data_parallel_size=2"], [f"{A}=ipc:///run/events"], "needs a TCP port"),
        ([f"{A},data_parallel_size=2"], [f"{A}=tcp://h:65535"], "leaves no port for rank 1"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_allowed(
    workers: list[str], events: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_options(workers, events)


def test_urls_have_one_spelling() -> None:
    for text, canonical in [
        ("HTTP://Engine-1:8000/", "http://engine-1:8000"),
        ("http://engine", "http://engine:80"),
        ("https://engine", "https://engine:443"),
        ("http://[2001:db8::1]:8000", "http://[2001:db8::1]:8000"),
        ("http+dns://engines:8000", "http+dns://engines:8000"),
    ]:
        assert str(WorkerUrl.parse(text)) == canonical


# -- file -----------------------------------------------------------------------------------------

TABLE = """
shared_events = ["tcp://10.0.0.9:5570"]
port = 8080

[[workers]]
url = "http://10.0.0.7:8000"
data_parallel_size = 2
events = ["tcp://{host}:5557,tcp://{host}:5657"]
shared_events = ["tcp://{host}:5570"]

[[workers]]
url = "http://10.0.0.8:8000"
"""


def test_a_file_lists_workers_beside_other_settings(tmp_path: Path) -> None:
    path = tmp_path / "router.toml"
    path.write_text(TABLE)
    options = parse_options(
        [f"{A},data_parallel_size=2", B],
        [
            f"{A}=tcp://10.0.0.7:5557,tcp://10.0.0.7:5657",
            f"{A}#*=tcp://10.0.0.7:5570",
            "*=tcp://10.0.0.9:5570",
        ],
    )
    assert WorkerFile(str(path)).listing.specs() == options.specs()


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"workers": {"url": A}}, r"\$\.workers"),
        ({"workers": [{"url": A, "size": 2}]}, "size"),
        ({"workers": [{}]}, "url"),
        ({"workers": [{"url": A, "data_parallel_size": 0}]}, "data_parallel_size"),
        ({"workers": [{"url": A}, {"url": A}]}, r"workers\[1\]\.url.*listed twice"),
        ({"workers": [{"url": "h:1"}]}, r"workers\[0\]\.url"),
        ({"workers": [{"url": A, "events": ["x"]}]}, "must be ENDPOINT"),
        ({"workers": [{"url": A}], "shared_events": ["x"]}, "must be ENDPOINT"),
    ],
)
def test_a_wrong_table_is_refused_with_the_place(table: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_table(table)


def test_a_file_is_read_again_only_if_it_changed_and_a_wrong_one_keeps_the_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "workers.toml"
    path.write_text(TABLE)
    file = WorkerFile(str(path))
    good = file.listing
    assert not file.reread()
    with caplog.at_level(logging.INFO):
        path.write_text("workers = 7")
        assert not file.reread()
        assert not file.reread()
        path.unlink()
        assert not file.reread()
        assert not file.reread()
    assert file.listing == good
    assert [record.msg.name for record in caplog.records] == ["worker_file_rejected"] * 2
    caplog.clear()
    with caplog.at_level(logging.INFO):
        path.write_text('[[workers]]\nurl = "http://10.0.0.8:8000"\n')
        assert file.reread()
    assert names(file.listing.specs()) == [B]
    assert [record.msg.name for record in caplog.records] == ["worker_file_recovered"]


def test_a_file_behind_a_link_that_changes_is_read_again(tmp_path: Path) -> None:
    """Kubernetes replaces the files of a ConfigMap this way."""
    for version, url in enumerate([A, B]):
        (tmp_path / str(version)).mkdir()
        (tmp_path / str(version) / "w.toml").write_text(f'[[workers]]\nurl = "{url}"\n')
    link = tmp_path / "current"
    link.symlink_to("0")
    file = WorkerFile(str(link / "w.toml"))
    (tmp_path / "next").symlink_to("1")
    (tmp_path / "next").rename(link)
    assert file.reread()
    assert names(file.listing.specs()) == [B]


def test_a_missing_file_is_refused_at_startup(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        WorkerFile(str(tmp_path / "none.toml"))


# -- DNS ------------------------------------------------------------------------------------------


def test_a_name_is_looked_up_again_and_a_failure_keeps_its_addresses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers: Iterator[tuple[str, ...] | OSError] = iter(
        [
            ("10.0.0.7",),
            ("10.0.0.7",),
            socket.gaierror(-3, "Temporary failure in name resolution"),
            socket.gaierror(-3, "Temporary failure in name resolution"),
            ("10.0.0.7", "10.0.0.8"),
        ]
    )

    async def resolve(name: str, port: int) -> tuple[str, ...]:
        assert (name, port) == ("engines", 8000)
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    async def first_two() -> list[tuple[str, ...]]:
        url = WorkerUrl.parse("http+dns://engines:8000")
        sets = discovery.dns_members(url, resolve=resolve, interval_s=0)
        return [await anext(sets), await anext(sets)]

    with caplog.at_level(logging.INFO):
        assert asyncio.run(first_two()) == [("10.0.0.7",), ("10.0.0.7", "10.0.0.8")]
    assert [record.msg.name for record in caplog.records] == ["dns_failed", "dns_recovered"]


def test_the_system_resolver_is_asked() -> None:
    assert "127.0.0.1" in asyncio.run(discovery.resolve("localhost", 80))


# -- all together ---------------------------------------------------------------------------------


class Observed:
    """Sets that a discovery handed out, to be waited for."""

    def __init__(self) -> None:
        self.sets: asyncio.Queue[tuple[WorkerSpec, ...]] = asyncio.Queue()

    async def until(self, expected: list[str]) -> tuple[WorkerSpec, ...]:
        while True:
            found = await asyncio.wait_for(self.sets.get(), 30)
            if sorted(names(found)) == sorted(expected):
                return found


@contextmanager
def running(discovery: Discovery) -> Iterator[None]:
    task = asyncio.get_running_loop().create_task(discovery.run())
    try:
        yield
    finally:
        task.cancel()


def test_options_file_and_groups_are_one_set_that_follows_changes(tmp_path: Path) -> None:
    path = tmp_path / "workers.toml"
    group = '[[workers]]\nurl = "http+dns://engines:8000"\nevents = ["tcp://{host}:5557"]\n'
    path.write_text(group)

    async def scenario() -> None:
        observed = Observed()
        addresses: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
        closed = asyncio.Event()

        async def members(url: WorkerUrl) -> AsyncIterator[tuple[str, ...]]:
            assert str(url) == "http+dns://engines:8000"
            try:
                while True:
                    yield await addresses.get()
            finally:
                closed.set()

        discovery = Discovery(
            parse_options([A], ["*=tcp://10.0.0.9:5570"]),
            observed.sets.put_nowait,
            file=WorkerFile(str(path)),
            lookups={"dns": members},
            file_interval_s=0.01,
        )
        with running(discovery):
            await observed.until([A])
            addresses.put_nowait(("10.0.0.8", "10.0.0.7"))
            found = await observed.until([A, B])
            shared = EventSource("tcp://10.0.0.9:5570")
            assert found[0].sources == (shared,), "the option wins over the group"
            assert found[1].sources == (EventSource("tcp://10.0.0.8:5557"), shared)
            addresses.put_nowait(())
            await observed.until([A])
            addresses.put_nowait(("10.0.0.9",))
            await observed.until([A, "http://10.0.0.9:8000"])
            path.write_text('[[workers]]\nurl = "http://10.0.0.8:8000"\n')
            await observed.until([A, B])
            await asyncio.wait_for(closed.wait(), 30)

    asyncio.run(scenario())


def test_a_set_that_did_not_change_is_not_handed_out_again(tmp_path: Path) -> None:
    path = tmp_path / "workers.toml"
    path.write_text(f'[[workers]]\nurl = "{A}"\n')

    async def scenario() -> None:
        observed = Observed()
        file = WorkerFile(str(path))
        discovery = Discovery(Listing(), observed.sets.put_nowait, file=file, file_interval_s=0.01)
        with running(discovery):
            await observed.until([A])
            path.write_text(f'\n[[workers]]\nurl = "{A}/"\n')
            path.with_suffix(".new").write_text(f'[[workers]]\nurl = "{B}"\n')
            path.with_suffix(".new").rename(path)
            assert names(await asyncio.wait_for(observed.sets.get(), 30)) == [B]

    asyncio.run(scenario())


def test_a_group_whose_lookup_fails_keeps_its_members_and_is_looked_up_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter([RuntimeError("a bug"), ConfigError("a field")])

    async def members(url: WorkerUrl) -> AsyncIterator[tuple[str, ...]]:
        if url.host == "others":
            yield ("10.0.0.8",)
            await asyncio.Event().wait()
        for failure in failures:
            yield ("10.0.0.7",)
            raise failure
        yield ("10.0.0.9",)

    async def scenario() -> None:
        observed = Observed()
        path = tmp_path / "workers.toml"
        path.write_text('[[workers]]\nurl = "http+dns://engines:8000"\n')
        discovery = Discovery(
            parse_options(["http+dns://others:8000"], []),
            observed.sets.put_nowait,
            file=WorkerFile(str(path)),
            lookups={"dns": members},
            file_interval_s=0.01,
            retry_interval_s=0.01,
        )
        with running(discovery):
            await observed.until(["http://10.0.0.7:8000", B])
            await observed.until(["http://10.0.0.9:8000", B])

    asyncio.run(scenario())
    assert "a bug" in caplog.text and "a field" in caplog.text


def test_an_option_that_can_never_be_looked_up_ends_the_discovery() -> None:
    async def members(url: WorkerUrl) -> AsyncIterator[tuple[str, ...]]:
        raise ConfigError("a package is missing")
        yield ()

    async def scenario() -> None:
        listing = parse_options(["http+dns://engines:8000"], [])
        discovery = Discovery(
            listing, lambda specs: None, lookups={"dns": members}, file_interval_s=0.01
        )
        await asyncio.wait_for(discovery.run(), 30)

    with pytest.raises(ConfigError, match="a package is missing"):
        asyncio.run(scenario())
