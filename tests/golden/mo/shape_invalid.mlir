// expected: reshape: f32[n, 4] has n * 4 elements, [n, 2] has n * 2; state what is equal with rebind
mo.graph @g(%0: !mo.tensor<[n, 4], f32, cpu:0>) {
  %1 = mo.reshape(%0) : (!mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 2], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: reshape: f32[4] to f16[2, 2] changes more than the shape
mo.graph @g(%0: !mo.tensor<[4], f32, cpu:0>) {
  %1 = mo.reshape(%0) : (!mo.tensor<[4], f32, cpu:0>) -> !mo.tensor<[2, 2], f16, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: broadcast_to: f32[4] does not broadcast to [4, 2]
mo.graph @g(%0: !mo.tensor<[4], f32, cpu:0>) {
  %1 = mo.broadcast_to(%0) : (!mo.tensor<[4], f32, cpu:0>) -> !mo.tensor<[4, 2], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: rebind: axis 0 of f32[n] is n, which is never n + 1: why
mo.graph @g(%0: !mo.tensor<[n], f32, cpu:0>) {
  %1 = mo.rebind(%0) {message = "why"} : (!mo.tensor<[n], f32, cpu:0>) -> !mo.tensor<[n + 1], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: transpose: [0, 0] does not permute the 2 axes of f32[2, 3]
mo.graph @g(%0: !mo.tensor<[2, 3], f32, cpu:0>) {
  %1 = mo.transpose(%0) {perm = array<i64: 0, 0>} : (!mo.tensor<[2, 3], f32, cpu:0>) -> !mo.tensor<[2, 2], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: slice: 0:5:1 is out of range for axis 0 of size 4
mo.graph @g(%0: !mo.tensor<[4], f32, cpu:0>) {
  %1 = mo.slice(%0) {start = #mo.shape<[0]>, stop = #mo.shape<[5]>, step = #mo.shape<[1]>} : (!mo.tensor<[4], f32, cpu:0>) -> !mo.tensor<[5], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: slice: the step of axis 0 is 0, expected an int, not 0
mo.graph @g(%0: !mo.tensor<[4], f32, cpu:0>) {
  %1 = mo.slice(%0) {start = #mo.shape<[0]>, stop = #mo.shape<[4]>, step = #mo.shape<[0]>} : (!mo.tensor<[4], f32, cpu:0>) -> !mo.tensor<[4], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: slice: the slice has shape [2], not [3]
mo.graph @g(%0: !mo.tensor<[4], f32, cpu:0>) {
  %1 = mo.slice(%0) {start = #mo.shape<[0]>, stop = #mo.shape<[4]>, step = #mo.shape<[2]>} : (!mo.tensor<[4], f32, cpu:0>) -> !mo.tensor<[3], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: slice: start is si64[2], expected si64[1]
mo.graph @g(%0: !mo.tensor<[4], f32, cpu:0>, %1: !mo.tensor<[2], si64, cpu:0>) {
  %2 = mo.slice_dynamic(%0, %1, %1, %1) : (!mo.tensor<[4], f32, cpu:0>, !mo.tensor<[2], si64, cpu:0>, !mo.tensor<[2], si64, cpu:0>, !mo.tensor<[2], si64, cpu:0>) -> !mo.tensor<[m], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: concat: axis 1 of operand 1 is 3, of operand 0 2; only axis 0 may differ
mo.graph @g(%0: !mo.tensor<[4, 2], f32, cpu:0>, %1: !mo.tensor<[4, 3], f32, cpu:0>) {
  %2 = mo.concat(%0, %1) {axis = 0 : i64} : (!mo.tensor<[4, 2], f32, cpu:0>, !mo.tensor<[4, 3], f32, cpu:0>) -> !mo.tensor<[8, 2], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: concat: axis -1 is out of range for a tensor of rank 1
mo.graph @g(%0: !mo.tensor<[4], f32, cpu:0>) {
  %1 = mo.concat(%0, %0) {axis = -1 : i64} : (!mo.tensor<[4], f32, cpu:0>, !mo.tensor<[4], f32, cpu:0>) -> !mo.tensor<[8], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: attribute 'axis' is true, expected int
mo.graph @g(%0: !mo.tensor<[4], f32, cpu:0>) {
  %1 = mo.concat(%0, %0) {axis = true} : (!mo.tensor<[4], f32, cpu:0>, !mo.tensor<[4], f32, cpu:0>) -> !mo.tensor<[8], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: pad: the padding -1 of axis 0 is negative
mo.graph @g(%0: !mo.tensor<[4], f32, cpu:0>) {
  %1 = mo.pad(%0) {low = #mo.shape<[-1]>, high = #mo.shape<[0]>, mode = "constant", value = 0.0 : f64} : (!mo.tensor<[4], f32, cpu:0>) -> !mo.tensor<[3], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: range: start is f32[1], expected a scalar of dtype float32 on cpu:0
mo.graph @g(%0: !mo.tensor<[1], f32, cpu:0>) {
  %1 = mo.range(%0, %0, %0) : (!mo.tensor<[1], f32, cpu:0>, !mo.tensor<[1], f32, cpu:0>, !mo.tensor<[1], f32, cpu:0>) -> !mo.tensor<[n], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: slice: the attributes {start = array<i64: 0>, stop = array<i64: 4>, step = array<i64: 1>} are not of the form that the op has: 'int' object has no attribute 'is_static'
mo.graph @g(%0: !mo.tensor<[4], f32, cpu:0>) {
  %1 = mo.slice(%0) {start = array<i64: 0>, stop = array<i64: 4>, step = array<i64: 1>} : (!mo.tensor<[4], f32, cpu:0>) -> !mo.tensor<[4], f32, cpu:0>
  mo.output() : () -> ()
}
