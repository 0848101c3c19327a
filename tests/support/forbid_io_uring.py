"""Run this interpreter with io_uring forbidden by a seccomp filter, as in most containers."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER_MODE = 38, 22, 2
_LOAD_WORD, _AT_LEAST, _ABOVE, _RETURN = 0x20, 0x35, 0x25, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000 | errno.EPERM
_FIRST_CALL, _LAST_CALL = 425, 427  # io_uring_setup, _enter, _register, on every architecture


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def forbid() -> None:
    instructions = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (_LOAD_WORD, 0, 0, 0),  # the call's number
            (_AT_LEAST, 0, 2, _FIRST_CALL),
            (_ABOVE, 1, 0, _LAST_CALL),
            (_RETURN, 0, 0, _FAIL),
            (_RETURN, 0, 0, _ALLOW),
        )
    )
    memory = ctypes.create_string_buffer(instructions)
    program = _Program(len(instructions) // 8, ctypes.addressof(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (_NO_NEW_PRIVILEGES, 1, 0, 0, 0),
        (_SET_SECCOMP, _FILTER_MODE, ctypes.byref(program)),
    ):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    forbid()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
