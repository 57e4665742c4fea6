"""`device_ids` and `output_device`, of which data-parallel training has one."""

import torch
from torch.utils._pytree import tree_map


def place_of(module: torch.nn.Module, device_ids, output_device) -> torch.device | None:
    """Where inputs are to be moved; None: nowhere."""
    if not device_ids:
        if output_device is not None:
            raise ValueError("output_device without device_ids")
        return None
    if len(device_ids) > 1:
        raise ValueError(f"device_ids={device_ids!r}: one device per rank; leave it out for a module on several devices")
    device = device_ids[0] if isinstance(device_ids[0], torch.device) else torch.device("cuda", device_ids[0])
    places = {p.device for p in module.parameters()}
    if places != {device}:
        raise ValueError(f"device_ids={device_ids!r}, but the module's parameters are on "
                         f"{', '.join(sorted(map(str, places)))}; move the module there first")
    if output_device is not None and output_device not in (device, device_ids[0]):
        raise ValueError(f"output_device={output_device!r} is another device than device_ids={device_ids!r}")
    return device


def to_device(inputs, device: torch.device):
    return tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, inputs)
