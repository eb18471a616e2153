builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 8], f32, cpu:0>, %v: !mo.tensor<[8], f32, cpu:0>) -> (!mo.tensor<[8, n], f32, cpu:0>) {
    %0 = mo.broadcast_to(%v) : (!mo.tensor<[8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
    %1 = mo.transpose(%x) {perm = array<i64: 1, 0>} : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[8, n], f32, cpu:0>
    %2 = mo.transpose(%0) {perm = array<i64: 1, 0>} : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[8, n], f32, cpu:0>
    %3 = mo.neg(%2) : (!mo.tensor<[8, n], f32, cpu:0>) -> !mo.tensor<[8, n], f32, cpu:0>
    %t = mo.add(%1, %3) : (!mo.tensor<[8, n], f32, cpu:0>, !mo.tensor<[8, n], f32, cpu:0>) -> !mo.tensor<[8, n], f32, cpu:0>
    %y = mo.exp(%t) : (!mo.tensor<[8, n], f32, cpu:0>) -> !mo.tensor<[8, n], f32, cpu:0>
    mo.output(%y) : (!mo.tensor<[8, n], f32, cpu:0>) -> ()
  }
}
