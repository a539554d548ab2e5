"""The vendor's `torch.npu`, answered by what stands in: the GPU if there is one, else the CPU."""

import torch

Device = torch.device | str | int | None


def standin(device: Device = None) -> torch.device:
    """The device that an npu, named as "npu:0", 0 or not at all, stands for."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if isinstance(device, str):
        device = device.replace("npu", "cuda", 1)
    elif isinstance(device, int):
        device = f"cuda:{device}"
    return torch.device("cuda" if device is None else device)


def is_available() -> bool:
    return True


def device_count() -> int:
    return max(torch.cuda.device_count(), 1)


def get_device_name(device: Device = None) -> str:
    return torch.cuda.get_device_name(standin(device)) if torch.cuda.is_available() else "CPU"


def set_device(device: Device) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(standin(device))


def current_device() -> int:
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def synchronize(device: Device = None) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize(standin(device))
