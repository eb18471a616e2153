builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 8], f32, cpu:0>, %v: !mo.tensor<[8], f32, cpu:0>) -> (!mo.tensor<[n, 8], f32, cpu:0>) {
    %y = mok.region(%x, %v) {kind = "map"} : (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0> {
    ^bb0(%0: !mo.tensor<[n, 8], f32, cpu:0>, %1: !mo.tensor<[8], f32, cpu:0>):
      %b = mo.broadcast_to(%1) : (!mo.tensor<[8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
      %a = mo.add(%0, %b) : (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
      %g = mo.gelu(%a) {approximate = "tanh"} : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
      %y_1 = mo.mul(%g, %0) : (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
      mok.yield(%y_1) : (!mo.tensor<[n, 8], f32, cpu:0>) -> ()
    }
    mo.output(%y) : (!mo.tensor<[n, 8], f32, cpu:0>) -> ()
  }
}
