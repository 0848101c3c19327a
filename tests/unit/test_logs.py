"""Log lines, as text and as JSON."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexcache.logs import JsonFormatter, LogEvent, log_event, noted_events

LOGFMT_PAIR = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|[^\s"]+)')


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.Logger("flexcache.part", logging.INFO)
    yield logger
    logger.handlers.clear()


def lines_of(logger: logging.Logger, formatter: logging.Formatter) -> io.StringIO:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    return stream


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "n=3"),
        (0.5, "n=0.5"),
        (1 / 3, "n=0.333333"),
        (True, "n=True"),
        ("plain", "n=plain"),
        ("tcp://1.2.3.4:5", "n=tcp://1.2.3.4:5"),
        ("two words", 'n="two words"'),
        ("", 'n=""'),
        ("a=b", 'n="a=b"'),
        ('say "x"', r'n="say \"x\""'),
        ("two\nlines", r'n="two\nlines"'),
    ],
)
def test_a_field_is_quoted_where_it_must_be(value: object, text: str) -> None:
    assert str(LogEvent("happened", {"n": value})) == f"happened {text}"


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.text(max_size=30)))
def test_any_text_stays_one_parsable_line(fields: dict[str, str]) -> None:
    line = str(LogEvent("happened", dict(fields)))
    assert len(line.splitlines()) == 1
    event, _, rest = line.partition(" ")
    assert event == "happened"
    pairs = LOGFMT_PAIR.findall(rest)
    assert " ".join(f"{key}={text}" for key, text in pairs) == rest
    told = {key: json.loads(text) if text[0] == '"' else text for key, text in pairs}
    assert told == fields


def test_unknown_fields_are_left_out(logger: logging.Logger) -> None:
    stream = lines_of(logger, logging.Formatter("%(message)s"))
    log_event(logger, logging.INFO, "session_began", engine="a", pid=None)
    assert stream.getvalue() == "session_began engine=a\n"


def test_events_below_the_level_are_not_logged(logger: logging.Logger) -> None:
    stream = lines_of(logger, logging.Formatter("%(message)s"))
    log_event(logger, logging.DEBUG, "session_began")
    assert stream.getvalue() == ""


def test_json_has_an_object_per_line_with_the_fields_as_they_are(logger: logging.Logger) -> None:
    stream = lines_of(logger, JsonFormatter())
    log_event(logger, logging.WARNING, "worker_died", worker="disk", pid=7, waits_s=0.25)
    logger.info("%d from elsewhere", 2)
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first.pop("ts").endswith("+00:00")
    assert first == {
        "level": "WARNING",
        "logger": "flexcache.part",
        "event": "worker_died",
        "fields": {"worker": "disk", "pid": 7, "waits_s": 0.25},
    }
    assert (second["event"], second["fields"]) == ("2 from elsewhere", {})


def test_json_holds_a_traceback_within_its_line(logger: logging.Logger) -> None:
    stream = lines_of(logger, JsonFormatter())
    try:
        raise RuntimeError("torn")
    except RuntimeError:
        log_event(logger, logging.ERROR, "message_failed", exc_info=True)
    (line,) = stream.getvalue().splitlines()
    assert "RuntimeError: torn" in json.loads(line)["exc"]


def test_a_record_names_the_file_of_its_caller(logger: logging.Logger) -> None:
    stream = lines_of(logger, logging.Formatter("%(filename)s"))
    log_event(logger, logging.INFO, "session_began")
    assert stream.getvalue() == "test_logs.py\n"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_process_logs_flexcache_at_its_level_and_other_loggers_at_warning(
    log_format: str,
) -> None:
    code = f"""
import logging
from flexcache.logs import log_event, set_up_logging
set_up_logging("INFO", {log_format!r})
log_event(logging.getLogger("flexcache.x"), logging.INFO, "ours", n=1)
log_event(logging.getLogger("flexcache.x"), logging.DEBUG, "too_fine")
logging.getLogger("other").info("chatter")
logging.getLogger("other").warning("theirs")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, second = done.stderr.splitlines()
    if log_format == "json":
        assert json.loads(first)["event"] == "ours"
        assert json.loads(second)["event"] == "theirs"
    else:
        assert first.endswith("INFO flexcache.x: ours n=1")
        assert second.endswith("WARNING other: theirs")


def test_the_last_warnings_and_errors_are_noted_as_text(logger: logging.Logger) -> None:
    lines_of(logger, logging.Formatter("%(message)s"))
    log_event(logger, logging.INFO, "session_began")
    log_event(logger, logging.WARNING, "peer_lost", peer="a" * 10_000)
    error = RuntimeError("torn")
    log_event(logger, logging.ERROR, "message_failed", exc_info=error, n=1)
    latest, before, *_ = noted_events()
    assert (latest.level, latest.logger) == ("ERROR", "flexcache.part")
    assert latest.text == "message_failed n=1 (RuntimeError: torn)"
    assert before.text.startswith("peer_lost peer=aaa")
    assert len(before.text) == 500
    assert before.time <= latest.time
    for i in range(200):
        log_event(logger, logging.WARNING, "again", n=i)
    assert [each.text for each in noted_events()] == [f"again n={199 - i}" for i in range(64)]
