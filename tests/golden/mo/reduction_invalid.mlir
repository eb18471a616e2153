// expected: sum: axis 2 is out of range for a tensor of rank 2
mo.graph @g(%0: !mo.tensor<[4, 2], f32, cpu:0>) {
  %1 = mo.reduce_sum(%0) {axis = 2 : i64} : (!mo.tensor<[4, 2], f32, cpu:0>) -> !mo.tensor<[4, 2], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: sum: the result types are f32[4], expected f32[4, 1]
mo.graph @g(%0: !mo.tensor<[4, 2], f32, cpu:0>) {
  %1 = mo.reduce_sum(%0) {axis = 1 : i64} : (!mo.tensor<[4, 2], f32, cpu:0>) -> !mo.tensor<[4], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: max: axis 0 of f32[0] is empty
mo.graph @g(%0: !mo.tensor<[0], f32, cpu:0>) {
  %1 = mo.reduce_max(%0) {axis = 0 : i64} : (!mo.tensor<[0], f32, cpu:0>) -> !mo.tensor<[1], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: softmax: the operand is si32[4], expected a floating-point type
mo.graph @g(%0: !mo.tensor<[4], si32, cpu:0>) {
  %1 = mo.softmax(%0) {axis = 0 : i64} : (!mo.tensor<[4], si32, cpu:0>) -> !mo.tensor<[4], si32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: argmax: the operand is bool[4], expected a number
mo.graph @g(%0: !mo.tensor<[4], bool, cpu:0>) {
  %1 = mo.argmax(%0) {axis = 0 : i64} : (!mo.tensor<[4], bool, cpu:0>) -> !mo.tensor<[1], si64, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: top_k: k is 5, expected 1 to 4, the size of axis 0
mo.graph @g(%0: !mo.tensor<[4], f32, cpu:0>) {
  %1, %2 = mo.top_k(%0) {k = 5 : i64, axis = 0 : i64} : (!mo.tensor<[4], f32, cpu:0>) -> (!mo.tensor<[5], f32, cpu:0>, !mo.tensor<[5], si64, cpu:0>)
  mo.output() : () -> ()
}
