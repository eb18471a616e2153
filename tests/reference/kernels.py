"""The kernel that an example of `max.torch` names."""

from max import kernel as k


@k.register("grayscale")
def grayscale(out: k.Output[k.u8, 2], img: k.Input[k.u8, 3], ctx: k.Context):
    for i, j in ctx.parallel(out.shape):
        r, g, b = k.f32(img[i, j, 0]), k.f32(img[i, j, 1]), k.f32(img[i, j, 2])
        out[i, j] = k.u8(0.21 * r + 0.71 * g + 0.07 * b)
