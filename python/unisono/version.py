"""The torch this package is built against."""

TORCH_MINOR = "2.13"


def check_torch(found: str) -> None:
    """*Throws* ImportError with the line that mends it."""
    if found.split("+")[0].split(".")[:2] != TORCH_MINOR.split("."):
        raise ImportError(f"unisono is built against torch {TORCH_MINOR}, but torch {found} is installed. "
                          f"Install that one:\n  pip install torch=={TORCH_MINOR}.0")
