"""What unisono raises: one class per kind of failure, all of them `Error`."""


class Error(RuntimeError):
    """Anything that goes wrong in unisono; `code` says what kind of thing it was."""

    code = "internal"


class InvalidArgumentError(Error, ValueError):
    """The caller can fix it here: a bad option, dtype, shape or environment variable."""

    code = "invalid_argument"


class MismatchError(Error):
    """Ranks disagree: another operation, size, dtype, model or mode."""

    code = "mismatch"


class TimeoutError(Error, TimeoutError):  # noqa: A001
    """A deadline passed while a peer was alive but did not come."""

    code = "timeout"


class PeerLostError(Error, ConnectionError):
    """A peer process died, or left the group."""

    code = "peer_lost"


class CorruptError(Error):
    """Data read back is not what was written."""

    code = "corrupt"


class InternalError(Error):
    """A bug in unisono, or an operating system call that should not fail."""

    code = "internal"


def make(code: str, message: str) -> Error:
    """The exception for a C++ error."""
    return next((kind for kind in Error.__subclasses__() if kind.code == code), Error)(message)
