// expected: gather: the indices are f32[2], expected integers
mo.graph @g(%0: !mo.tensor<[4], f32, cpu:0>, %1: !mo.tensor<[2], f32, cpu:0>) {
  %2 = mo.gather(%0, %1) {axis = 0 : i64} : (!mo.tensor<[4], f32, cpu:0>, !mo.tensor<[2], f32, cpu:0>) -> !mo.tensor<[2], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: gather: axis 1 is out of range for a tensor of rank 1
mo.graph @g(%0: !mo.tensor<[4], f32, cpu:0>, %1: !mo.tensor<[2], si64, cpu:0>) {
  %2 = mo.gather(%0, %1) {axis = 1 : i64} : (!mo.tensor<[4], f32, cpu:0>, !mo.tensor<[2], si64, cpu:0>) -> !mo.tensor<[2], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: gather_nd: the last axis of the indices si64[n] is the index vector, its size must be static
mo.graph @g(%0: !mo.tensor<[4], f32, cpu:0>, %1: !mo.tensor<[n], si64, cpu:0>) {
  %2 = mo.gather_nd(%0, %1) {batch_dims = 0 : i64} : (!mo.tensor<[4], f32, cpu:0>, !mo.tensor<[n], si64, cpu:0>) -> !mo.tensor<[], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: gather_nd: the batch dims of the input are [a], of the indices [b]; they must be equal
mo.graph @g(%0: !mo.tensor<[a, 4], f32, cpu:0>, %1: !mo.tensor<[b, 1], si64, cpu:0>) {
  %2 = mo.gather_nd(%0, %1) {batch_dims = 1 : i64} : (!mo.tensor<[a, 4], f32, cpu:0>, !mo.tensor<[b, 1], si64, cpu:0>) -> !mo.tensor<[b], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: gather_nd: batch_dims is 2, expected 0 to 1 for indices si64[2, 1]
mo.graph @g(%0: !mo.tensor<[2, 4], f32, cpu:0>, %1: !mo.tensor<[2, 1], si64, cpu:0>) {
  %2 = mo.gather_nd(%0, %1) {batch_dims = 2 : i64} : (!mo.tensor<[2, 4], f32, cpu:0>, !mo.tensor<[2, 1], si64, cpu:0>) -> !mo.tensor<[2], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: scatter: updates f32[2] and indices si64[3] must have one shape, of the input's rank 1
mo.graph @g(%0: !mo.tensor<[4], f32, cpu:0>, %1: !mo.tensor<[2], f32, cpu:0>, %2: !mo.tensor<[3], si64, cpu:0>) {
  %3 = mo.scatter(%0, %1, %2) {axis = 0 : i64} : (!mo.tensor<[4], f32, cpu:0>, !mo.tensor<[2], f32, cpu:0>, !mo.tensor<[3], si64, cpu:0>) -> !mo.tensor<[4], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: scatter_nd: the updates are f32[2, 5], expected shape [2, 4]
mo.graph @g(%0: !mo.tensor<[3, 4], f32, cpu:0>, %1: !mo.tensor<[2, 5], f32, cpu:0>, %2: !mo.tensor<[2, 1], si64, cpu:0>) {
  %3 = mo.scatter_nd(%0, %1, %2) : (!mo.tensor<[3, 4], f32, cpu:0>, !mo.tensor<[2, 5], f32, cpu:0>, !mo.tensor<[2, 1], si64, cpu:0>) -> !mo.tensor<[3, 4], f32, cpu:0>
  mo.output() : () -> ()
}
