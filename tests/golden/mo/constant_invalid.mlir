// expected: constant: a value of f32[2] for the type f32[3]
mo.graph @g() {
  %0 = mo.constant() {value = #mo.dense<f32, [2], [1.0, 2.0]>} : () -> !mo.tensor<[3], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: attribute 'value' is 1 : i64, expected ndarray
mo.graph @g() {
  %0 = mo.constant() {value = 1 : i64} : () -> !mo.tensor<[], si64, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: constant_external: the name is empty
mo.graph @g() {
  %0 = mo.constant.external() {name = ""} : () -> !mo.tensor<[3], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: transfer_to: f32[3] to f32[4] on gpu:0 changes more than the device
mo.graph @g(%0: !mo.tensor<[3], f32, cpu:0>) {
  %1 = mo.transfer(%0) : (!mo.tensor<[3], f32, cpu:0>) -> !mo.tensor<[4], f32, gpu:0>
  mo.output() : () -> ()
}
