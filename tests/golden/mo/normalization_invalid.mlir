// expected: rms_norm: gamma is f32[3], expected shape [4], the last dimension of the input f32[n, 4]
mo.graph @g(%0: !mo.tensor<[n, 4], f32, cpu:0>, %1: !mo.tensor<[3], f32, cpu:0>) {
  %2 = mo.rms_norm(%0, %1) {epsilon = 1.0e-05 : f64, weight_offset = 0.0 : f64, multiply_before_cast = true} : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[3], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: rms_norm: epsilon is 0.0, expected a positive number
mo.graph @g(%0: !mo.tensor<[n, 4], f32, cpu:0>, %1: !mo.tensor<[4], f32, cpu:0>) {
  %2 = mo.rms_norm(%0, %1) {epsilon = 0.0 : f64, weight_offset = 0.0 : f64, multiply_before_cast = true} : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: layer_norm: beta is bf16[4], the input is f32[n, 4]; expected one dtype (cast)
mo.graph @g(%0: !mo.tensor<[n, 4], f32, cpu:0>, %1: !mo.tensor<[4], f32, cpu:0>, %2: !mo.tensor<[4], bf16, cpu:0>) {
  %3 = mo.layer_norm(%0, %1, %2) {epsilon = 1.0e-05 : f64} : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[4], f32, cpu:0>, !mo.tensor<[4], bf16, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
  mo.output() : () -> ()
}
