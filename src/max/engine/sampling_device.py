"""The device that samples the tokens of a model."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from max.driver import Device
from max.engine._session import InferenceSession

__all__ = ["sampling_device"]


def sampling_device(session: InferenceSession, device: Device) -> Device:
    """The device that samples from the logits of a model: the model's, or the host if that one has no sampling.

    Args:
        session: The session.
        device: The device of the model.

    Raises:
        ValueError: The session does not have the device.
    """
    backends = session._backends
    return device if backends.of(device).samples else backends.host.device
