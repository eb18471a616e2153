// expected: matmul: f32[m, 4] @ f32[3, 5]: the last dimension of the left operand is 4, the second to last of the right one 3
mo.graph @g(%0: !mo.tensor<[m, 4], f32, cpu:0>, %1: !mo.tensor<[3, 5], f32, cpu:0>) {
  %2 = mo.matmul(%0, %1) : (!mo.tensor<[m, 4], f32, cpu:0>, !mo.tensor<[3, 5], f32, cpu:0>) -> !mo.tensor<[m, 5], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: matmul: f32[4] @ f32[4, 5]: both must have rank 2 or more
mo.graph @g(%0: !mo.tensor<[4], f32, cpu:0>, %1: !mo.tensor<[4, 5], f32, cpu:0>) {
  %2 = mo.matmul(%0, %1) : (!mo.tensor<[4], f32, cpu:0>, !mo.tensor<[4, 5], f32, cpu:0>) -> !mo.tensor<[5], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: matmul: f32[2, 3, 4] @ f32[1, 4, 5]: the leading dimensions must be equal (broadcast_to)
mo.graph @g(%0: !mo.tensor<[2, 3, 4], f32, cpu:0>, %1: !mo.tensor<[1, 4, 5], f32, cpu:0>) {
  %2 = mo.matmul(%0, %1) : (!mo.tensor<[2, 3, 4], f32, cpu:0>, !mo.tensor<[1, 4, 5], f32, cpu:0>) -> !mo.tensor<[2, 3, 5], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: matmul: the operands are f32[2, 2] and bf16[2, 2], expected one dtype
mo.graph @g(%0: !mo.tensor<[2, 2], f32, cpu:0>, %1: !mo.tensor<[2, 2], bf16, cpu:0>) {
  %2 = mo.matmul(%0, %1) : (!mo.tensor<[2, 2], f32, cpu:0>, !mo.tensor<[2, 2], bf16, cpu:0>) -> !mo.tensor<[2, 2], f32, cpu:0>
  mo.output() : () -> ()
}
