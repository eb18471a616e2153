builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 8], f32, cpu:0>, %r: !mo.tensor<[n, 8], f32, cpu:0>, %v: !mo.tensor<[8], f32, cpu:0>) -> (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) {
    %h, %y = mok.region(%x, %r, %v) {kind = "rows"} : (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[8], f32, cpu:0>) -> (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) {
    ^bb0(%0: !mo.tensor<[n, 8], f32, cpu:0>, %1: !mo.tensor<[n, 8], f32, cpu:0>, %2: !mo.tensor<[8], f32, cpu:0>):
      %h_1 = mo.add(%0, %1) : (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
      %m = mo.reduce_mean(%h_1) {axis = 1 : i64} : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 1], f32, cpu:0>
      %b = mo.broadcast_to(%m) : (!mo.tensor<[n, 1], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
      %c = mo.sub(%h_1, %b) : (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
      %y_1 = mo.rms_norm(%c, %2) {epsilon = 1.000000e-05 : f64, weight_offset = 0.000000e+00 : f64, multiply_before_cast = true} : (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
      mok.yield(%h_1, %y_1) : (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) -> ()
    }
    mo.output(%h, %y) : (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) -> ()
  }
}
