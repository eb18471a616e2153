// expected: exp: operand 0 has dtype int32, expected a floating-point type
mo.graph @g(%0: !mo.tensor<[2], si32, cpu:0>) {
  %1 = mo.exp(%0) : (!mo.tensor<[2], si32, cpu:0>) -> !mo.tensor<[2], si32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: exp: the result types are f64[2], expected f32[2]
mo.graph @g(%0: !mo.tensor<[2], f32, cpu:0>) {
  %1 = mo.exp(%0) : (!mo.tensor<[2], f32, cpu:0>) -> !mo.tensor<[2], f64, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: takes 1 operands, got 2
mo.graph @g(%0: !mo.tensor<[2], f32, cpu:0>) {
  %1 = mo.exp(%0, %0) : (!mo.tensor<[2], f32, cpu:0>, !mo.tensor<[2], f32, cpu:0>) -> !mo.tensor<[2], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: has 1 results, got 0
mo.graph @g(%0: !mo.tensor<[2], f32, cpu:0>) {
  mo.exp(%0) : (!mo.tensor<[2], f32, cpu:0>) -> ()
  mo.output() : () -> ()
}
// -----
// expected: exp: operand 0 is buffer f32[2], expected a tensor; load the buffer first
mo.graph @g(%0: !mo.buffer<[2], f32, cpu:0>) {
  %1 = mo.exp(%0) : (!mo.buffer<[2], f32, cpu:0>) -> !mo.tensor<[2], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: add: the operands are f32 and f16, expected one dtype (cast)
mo.graph @g(%0: !mo.tensor<[2], f32, cpu:0>, %1: !mo.tensor<[2], f16, cpu:0>) {
  %2 = mo.add(%0, %1) : (!mo.tensor<[2], f32, cpu:0>, !mo.tensor<[2], f16, cpu:0>) -> !mo.tensor<[2], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: add: operand 1 is f32[1], operand 0 is f32[n]; element-wise operands have equal shapes (broadcast_to)
mo.graph @g(%0: !mo.tensor<[n], f32, cpu:0>, %1: !mo.tensor<[1], f32, cpu:0>) {
  %2 = mo.add(%0, %1) : (!mo.tensor<[n], f32, cpu:0>, !mo.tensor<[1], f32, cpu:0>) -> !mo.tensor<[n], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: mul: operand 0 has dtype bool, expected a number
mo.graph @g(%0: !mo.tensor<[2], bool, cpu:0>) {
  %1 = mo.mul(%0, %0) : (!mo.tensor<[2], bool, cpu:0>, !mo.tensor<[2], bool, cpu:0>) -> !mo.tensor<[2], bool, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: and: operand 0 has dtype float32, expected bool
mo.graph @g(%0: !mo.tensor<[2], f32, cpu:0>) {
  %1 = mo.and(%0, %0) : (!mo.tensor<[2], f32, cpu:0>, !mo.tensor<[2], f32, cpu:0>) -> !mo.tensor<[2], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: gelu: approximate is 'fast', expected one of none, tanh, quick
mo.graph @g(%0: !mo.tensor<[2], f32, cpu:0>) {
  %1 = mo.gelu(%0) {approximate = "fast"} : (!mo.tensor<[2], f32, cpu:0>) -> !mo.tensor<[2], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: the attribute 'approximate' is missing
mo.graph @g(%0: !mo.tensor<[2], f32, cpu:0>) {
  %1 = mo.gelu(%0) : (!mo.tensor<[2], f32, cpu:0>) -> !mo.tensor<[2], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: unknown attribute 'axis'; expected: none
mo.graph @g(%0: !mo.tensor<[2], f32, cpu:0>) {
  %1 = mo.exp(%0) {axis = 1 : i64} : (!mo.tensor<[2], f32, cpu:0>) -> !mo.tensor<[2], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: cast: f32[2] to f16[3] changes more than the dtype
mo.graph @g(%0: !mo.tensor<[2], f32, cpu:0>) {
  %1 = mo.cast(%0) : (!mo.tensor<[2], f32, cpu:0>) -> !mo.tensor<[3], f16, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: where: the condition has dtype float32, expected bool
mo.graph @g(%0: !mo.tensor<[2], f32, cpu:0>) {
  %1 = mo.select(%0, %0, %0) : (!mo.tensor<[2], f32, cpu:0>, !mo.tensor<[2], f32, cpu:0>, !mo.tensor<[2], f32, cpu:0>) -> !mo.tensor<[2], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: add: the operands are on different devices (cpu:0, gpu:0); transfer them first
mo.graph @g(%0: !mo.tensor<[2], f32, cpu:0>, %1: !mo.tensor<[2], f32, gpu:0>) {
  %2 = mo.add(%0, %1) : (!mo.tensor<[2], f32, cpu:0>, !mo.tensor<[2], f32, gpu:0>) -> !mo.tensor<[2], f32, cpu:0>
  mo.output() : () -> ()
}
