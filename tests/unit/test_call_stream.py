"""Messages in a stream: cut as they were sent, however they come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexcache.protocol.call_stream import CallReader, pack_call
from flexcache.protocol.messages import MAX_FRAME_BYTES

CALLS = st.lists(st.tuples(st.binary(max_size=40), st.none() | st.binary(max_size=40)), max_size=12)


@given(calls=CALLS, cuts=st.lists(st.integers(1, 50)))
def test_messages_come_out_as_they_went_in_however_the_stream_is_cut(
    calls: list[tuple[bytes, bytes | None]], cuts: list[int]
) -> None:
    stream = b"".join(pack_call(message, data) + (data or b"") for message, data in calls)
    reader, read = CallReader(), []
    for length in [*cuts, len(stream)]:
        read += reader.read(stream[:length])
        stream = stream[length:]
    assert read == [[message] if data is None else [message, data] for message, data in calls]


@pytest.mark.parametrize("lengths", [(-2, -1), (0, -2), (MAX_FRAME_BYTES + 1, -1), (1, 1 << 30)])
def test_lengths_that_no_message_has_are_refused(lengths: tuple[int, int]) -> None:
    header = b"".join(length.to_bytes(4, "little", signed=True) for length in lengths)
    with pytest.raises(ValueError, match="message of"):
        CallReader().read(header)
