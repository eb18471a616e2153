builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 8], f32, cpu:0>, %v: !mo.tensor<[8], f32, cpu:0>) -> (!mo.tensor<[8, n], f32, cpu:0>) {
    %n = mo.neg(%v) : (!mo.tensor<[8], f32, cpu:0>) -> !mo.tensor<[8], f32, cpu:0>
    %b = mo.broadcast_to(%n) : (!mo.tensor<[8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
    %0 = mo.transpose(%x) {perm = array<i64: 1, 0>} : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[8, n], f32, cpu:0>
    %1 = mo.transpose(%b) {perm = array<i64: 1, 0>} : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[8, n], f32, cpu:0>
    %t = mo.add(%0, %1) : (!mo.tensor<[8, n], f32, cpu:0>, !mo.tensor<[8, n], f32, cpu:0>) -> !mo.tensor<[8, n], f32, cpu:0>
    %y = mo.exp(%t) : (!mo.tensor<[8, n], f32, cpu:0>) -> !mo.tensor<[8, n], f32, cpu:0>
    mo.output(%y) : (!mo.tensor<[8, n], f32, cpu:0>) -> ()
  }
}
