"""Facts about values and ops that passes and lowering share: layouts, shapes, devices, exact conversions."""
