builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 8], f32, cpu:0>, %w: !mo.tensor<[16, 8], f32, cpu:0>, %u: !mo.tensor<[16, 8], f32, cpu:0>) -> (!mo.tensor<[n, 16], f32, cpu:0>) {
    %g = mok.matmul(%x, %w) {transpose_b = true} : (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[16, 8], f32, cpu:0>) -> !mo.tensor<[n, 16], f32, cpu:0>
    %y = mok.region(%x, %u, %g) {kind = "library"} : (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[16, 8], f32, cpu:0>, !mo.tensor<[n, 16], f32, cpu:0>) -> !mo.tensor<[n, 16], f32, cpu:0> {
    ^bb0(%0: !mo.tensor<[n, 8], f32, cpu:0>, %1: !mo.tensor<[16, 8], f32, cpu:0>, %2: !mo.tensor<[n, 16], f32, cpu:0>):
      %h = mok.matmul(%0, %1) {transpose_b = true} : (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[16, 8], f32, cpu:0>) -> !mo.tensor<[n, 16], f32, cpu:0>
      %s = mo.silu(%2) : (!mo.tensor<[n, 16], f32, cpu:0>) -> !mo.tensor<[n, 16], f32, cpu:0>
      %y_1 = mo.mul(%s, %h) : (!mo.tensor<[n, 16], f32, cpu:0>, !mo.tensor<[n, 16], f32, cpu:0>) -> !mo.tensor<[n, 16], f32, cpu:0>
      mok.yield(%y_1) : (!mo.tensor<[n, 16], f32, cpu:0>) -> ()
    }
    mo.output(%y) : (!mo.tensor<[n, 16], f32, cpu:0>) -> ()
  }
}
