"""`unisono trace merge`: several ranks' Chrome traces as one."""

import json
import os
import tempfile
from pathlib import Path


def read_events(path: str) -> list[dict]:
    try:
        data = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not a Chrome trace: {error}") from None
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise ValueError(f"{path} is not a Chrome trace: it holds no list of events")
    return events


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def merge(out: str, inputs: list[str]) -> int:
    """Writes the events of all inputs to `out`, which appears whole or not at all. Returns their number."""
    events = [event for path in inputs for event in read_events(path)]
    directory = os.path.dirname(os.path.abspath(out))
    handle, temporary = tempfile.mkstemp(prefix=".trace-", dir=directory)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump({"traceEvents": events}, file)
            os.fchmod(handle, 0o666 & ~_umask())
        os.replace(temporary, out)
    except BaseException:
        os.unlink(temporary)
        raise
    return len(events)
