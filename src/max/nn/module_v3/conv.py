"""A convolution over images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from max.driver import Device
from max.dtype import DType
from max.experimental import functional as F
from max.experimental import random
from max.experimental.tensor import Tensor
from max.graph import DeviceRef
from max.nn.layers.conv import check_groups, convolve, numbers, paddings
from max.nn.module_v3.module import Module

__all__ = ["Conv2d"]

_convolve = F.functional(convolve)


class Conv2d(Module):
    """Convolution over images; parameters are initialized at random.

    Shapes: ``[N, H, W, in_channels]`` gives ``[N, OH, OW, out_channels]``, with `permute` channels second.

    Args:
        kernel_size: The filter's height and width, or one number for both.
        in_channels: The channels of the input.
        out_channels: The channels of the result.
        dtype: The dtype of the parameters; None: the default dtype.
        stride: The step between windows along height and width, or one number for both.
        padding: Zero padding: one number, (height, width), or (top, bottom, left, right).
        dilation: The step between the taps of a window, as `stride`.
        num_groups: The number of channel groups; each is a separate convolution.
        device: The device of the parameters; None: the default device.
        has_bias: Whether there is a bias.
        permute: Whether channels come second, and the weight has PyTorch's layout.
        name: A name that `repr` shows.

    Raises:
        ValueError: The groups do not divide the channels, or an argument has the wrong number of values.
    """

    weight: Tensor
    """The filter: ``[R, S, in_channels / num_groups, out_channels]``, with `permute`
    ``[out_channels, in_channels / num_groups, R, S]``."""
    bias: Tensor | Literal[0]
    """The bias, of shape (`out_channels`,); 0 without one."""

    def __init__(
        self,
        kernel_size: int | tuple[int, int],
        in_channels: int,
        out_channels: int,
        dtype: DType | None = None,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | tuple[int, int, int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        num_groups: int = 1,
        device: Device | DeviceRef | None = None,
        has_bias: bool = False,
        permute: bool = False,
        name: str | None = None,
    ) -> None:
        check_groups("Conv2d", num_groups, in_channels, out_channels)
        self.kernel_size = numbers("Conv2d", "kernel_size", kernel_size, 2)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.stride = numbers("Conv2d", "stride", stride, 2)
        self.padding = paddings("Conv2d", padding, 2)
        self.dilation = numbers("Conv2d", "dilation", dilation, 2)
        self.num_groups = num_groups
        self.has_bias = has_bias
        self.permute = permute
        self.name = name
        if isinstance(device, DeviceRef):
            device = device.to_device()
        of_a_group = in_channels // num_groups
        shape = (
            (out_channels, of_a_group, *self.kernel_size)
            if permute
            else (*self.kernel_size, of_a_group, out_channels)
        )
        self.weight = random.normal(shape, dtype=dtype, device=device)
        self.bias = random.normal([out_channels], dtype=dtype, device=device) if has_bias else 0

    def __call__(self, x: Tensor) -> Tensor:
        """Convolves images.

        Args:
            x: The images: ``[N, H, W, in_channels]``, with `permute` ``[N, in_channels, H, W]``.

        Raises:
            ValueError: The rank or the channels of x differ, or a window is larger than the padded image.
        """
        bias = self.bias if isinstance(self.bias, Tensor) else None
        return _convolve(
            x, self.weight, bias, self.stride, self.padding, self.dilation, self.num_groups, self.permute
        )  # fmt: skip

    def _repr_items(self) -> Iterator[tuple[str, object]]:
        if self.name is not None:
            yield "name", self.name
        yield "kernel_size", self.kernel_size
        yield "in_channels", self.in_channels
        yield "out_channels", self.out_channels
