builtin.module {
  mo.graph @normalization(%0: !mo.tensor<[n, 4], f32, cpu:0>, %1: !mo.tensor<[4], f32, cpu:0>) -> (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 1], f32, cpu:0>) {
    %2 = mo.rms_norm(%0, %1) {epsilon = 1.000000e-05 : f64, weight_offset = 0.000000e+00 : f64, multiply_before_cast = true} : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %3 = mo.constant() {value = #mo.dense<f32, [4], [0.0, 0.0, 0.0, 0.0]>} : () -> !mo.tensor<[4], f32, cpu:0>
    %4 = mo.layer_norm(%0, %1, %3) {epsilon = 1.000000e-06 : f64} : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[4], f32, cpu:0>, !mo.tensor<[4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %5 = mo.reduce_mean(%0) {axis = 1 : i64} : (!mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 1], f32, cpu:0>
    %6 = mo.broadcast_to(%5) : (!mo.tensor<[n, 1], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %7 = mo.sub(%0, %6) : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %8 = mo.mul(%7, %7) : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %9 = mo.reduce_mean(%8) {axis = 1 : i64} : (!mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 1], f32, cpu:0>
    mo.output(%2, %4, %9) : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 1], f32, cpu:0>) -> ()
  }
}
