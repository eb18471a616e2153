builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 8], f32, cpu:0>) -> (!mo.tensor<[n, 8], f32, cpu:0>) {
    %a = mok.region(%x) {kind = "map"} : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0> {
    ^bb0(%0: !mo.tensor<[n, 8], f32, cpu:0>):
      %a_1 = mo.exp(%0) : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
      mok.yield(%a_1) : (!mo.tensor<[n, 8], f32, cpu:0>) -> ()
    }
    %c = mo.cumsum(%a) {axis = 1 : i64, exclusive = false, reverse = false} : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
    %y = mok.region(%a, %c) {kind = "map"} : (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0> {
    ^bb0(%0: !mo.tensor<[n, 8], f32, cpu:0>, %1: !mo.tensor<[n, 8], f32, cpu:0>):
      %y_1 = mo.add(%0, %1) : (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
      mok.yield(%y_1) : (!mo.tensor<[n, 8], f32, cpu:0>) -> ()
    }
    mo.output(%y) : (!mo.tensor<[n, 8], f32, cpu:0>) -> ()
  }
}
