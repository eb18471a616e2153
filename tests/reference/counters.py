"""The kernels that an example of `ops.cond` names."""

from max import kernel as k


@k.register("increment")
def increment(counter: k.InOut, ctx: k.Context):
    for i in ctx.parallel(counter.shape[0]):
        counter[i] = counter[i] + 1


@k.register("decrement")
def decrement(counter: k.InOut, ctx: k.Context):
    for i in ctx.parallel(counter.shape[0]):
        counter[i] = counter[i] - 1
