builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 8], f32, cpu:0>) -> (!mo.tensor<[n * 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) {
    %t = mo.transpose(%x) {perm = array<i64: 1, 0>} : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[8, n], f32, cpu:0>
    %0 = mok.region(%x) {kind = "map"} : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[8, n], f32, cpu:0> {
    ^bb0(%1: !mo.tensor<[n, 8], f32, cpu:0>):
      %t_1 = mo.transpose(%1) {perm = array<i64: 1, 0>} : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[8, n], f32, cpu:0>
      mok.yield(%t_1) : (!mo.tensor<[8, n], f32, cpu:0>) -> ()
    }
    %r = mo.reshape(%0) : (!mo.tensor<[8, n], f32, cpu:0>) -> !mo.tensor<[n * 8], f32, cpu:0>
    %1 = mok.region(%x) {kind = "map"} : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0> {
    ^bb0(%2: !mo.tensor<[n, 8], f32, cpu:0>):
      mok.yield(%2) : (!mo.tensor<[n, 8], f32, cpu:0>) -> ()
    }
    mo.output(%r, %1) : (!mo.tensor<[n * 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) -> ()
  }
}
